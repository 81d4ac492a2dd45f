# libxxhash, for the checksums of the scrubber.
add_library(moecached_xxhash INTERFACE)
pkg_check_modules(MOECACHED_XXHASH REQUIRED IMPORTED_TARGET libxxhash)
if(MOECACHED_STATIC)
  find_library(MOECACHED_XXHASH_ARCHIVE libxxhash.a PATHS ${MOECACHED_XXHASH_STATIC_LIBRARY_DIRS} REQUIRED)
  target_link_libraries(moecached_xxhash INTERFACE ${MOECACHED_XXHASH_ARCHIVE})
else()
  target_link_libraries(moecached_xxhash INTERFACE PkgConfig::MOECACHED_XXHASH)
endif()
