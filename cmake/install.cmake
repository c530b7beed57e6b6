# What is installed: the library, its one header, the command with man page and completion, and what lets other
# builds find them (CMake package, pkg-config). CPack makes a Debian package of the same.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS megamoe EXPORT megamoe_targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        PUBLIC_HEADER DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/megamoe)
if(TARGET megamoe_command)
  install(TARGETS megamoe_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  set_target_properties(megamoe_command PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
endif()

if(TARGET megamoe_docs)
  install(FILES ${PROJECT_BINARY_DIR}/megamoe.1.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES ${PROJECT_BINARY_DIR}/megamoe.bash RENAME megamoe
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/megamoe)
install(EXPORT megamoe_targets FILE megamoe-targets.cmake NAMESPACE megamoe:: DESTINATION ${package_dir})
configure_package_config_file(cmake/megamoe-config.cmake.in ${PROJECT_BINARY_DIR}/megamoe-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/megamoe-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/megamoe-config.cmake ${PROJECT_BINARY_DIR}/megamoe-config-version.cmake
        DESTINATION ${package_dir})

configure_file(cmake/megamoe.pc.in ${PROJECT_BINARY_DIR}/megamoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/megamoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES CHANGELOG.md README.md SECURITY.md docs/command.md docs/formats.md docs/numerics.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES LICENSE RENAME copyright DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME megamoe)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "NVFP4 Mixture-of-Experts layers on CPUs and NVIDIA GPUs")
set(CPACK_PACKAGE_CONTACT "megamoe maintainers <maintainers@megamoe.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_STRIP_FILES ON)
include(CPack)
