# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

# What a Python wheel carries: the library under one name, since wheels hold no links.
install(PROGRAMS $<TARGET_FILE:megamoe> DESTINATION . RENAME libmegamoe.so
  COMPONENT python EXCLUDE_FROM_ALL)

install(TARGETS megamoe EXPORT megamoe_targets)
if(MEGAMOE_ARCHIVE)
  install(FILES ${MEGAMOE_ARCHIVE} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY include/megamoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")

configure_file(cmake/megamoe.pc.in megamoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/megamoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/megamoe)
configure_package_config_file(cmake/megamoeConfig.cmake.in megamoeConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(megamoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/megamoeConfig.cmake ${PROJECT_BINARY_DIR}/megamoeConfigVersion.cmake
  DESTINATION ${package_dir})
install(EXPORT megamoe_targets NAMESPACE megamoe:: FILE megamoeTargets.cmake
  DESTINATION ${package_dir})

install(FILES completions/megamoe.bash RENAME megamoe
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES completions/_megamoe DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)

include(cmake/man.cmake)
