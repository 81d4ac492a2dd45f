# What `cmake --install` puts beside the programs: units, sysusers, an example configuration. Included by daemon/app, so that
# a build without the daemon installs none of it.
include(GNUInstallDirs)

# The units name /usr/bin and /usr/lib/moecached; an install elsewhere needs its own paths in them.
foreach(unit moecached.service llama-server@.service)
  file(READ ${CMAKE_CURRENT_LIST_DIR}/systemd/${unit} text)
  string(REPLACE "/usr/bin/moecached" "${CMAKE_INSTALL_FULL_BINDIR}/moecached" text "${text}")
  string(REPLACE "/usr/lib/moecached" "${CMAKE_INSTALL_PREFIX}/lib/moecached" text "${text}")
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/deploy/systemd/${unit} CONTENT "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/systemd/${unit})
  install(FILES ${PROJECT_BINARY_DIR}/deploy/systemd/${unit} DESTINATION lib/systemd/system)
endforeach()
install(FILES ${CMAKE_CURRENT_LIST_DIR}/systemd/moecached.sysusers DESTINATION lib/sysusers.d RENAME moecached.conf)
# Not into /etc: a configuration that somebody wrote must survive the next install.
install(FILES ${CMAKE_CURRENT_LIST_DIR}/moecached.toml DESTINATION ${CMAKE_INSTALL_DATADIR}/moecached)
