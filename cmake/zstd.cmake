# libzstd, for traces: moecachectl writes them, moecache-sim reads them.
add_library(moecached_zstd INTERFACE)
pkg_check_modules(MOECACHED_ZSTD REQUIRED IMPORTED_TARGET libzstd)
if(MOECACHED_STATIC)
  find_library(MOECACHED_ZSTD_ARCHIVE libzstd.a PATHS ${MOECACHED_ZSTD_STATIC_LIBRARY_DIRS} REQUIRED)
  target_link_libraries(moecached_zstd INTERFACE ${MOECACHED_ZSTD_ARCHIVE})
else()
  target_link_libraries(moecached_zstd INTERFACE PkgConfig::MOECACHED_ZSTD)
endif()
