# SPDX-License-Identifier: Apache-2.0
# libmegamoe.a: all objects linked into one whose hidden symbols are local, so that the archive, like
# the shared library, defines nothing but the public functions.
#
# Takes the list `layer_objects` and the path MEGAMOE_ARCHIVE; makes the target megamoe_static.
set(static_object ${CMAKE_CURRENT_BINARY_DIR}/megamoe_all.o)
add_custom_command(
  OUTPUT ${MEGAMOE_ARCHIVE}
  COMMAND ${CMAKE_LINKER} -r -o ${static_object} ${layer_objects}
  COMMAND ${CMAKE_OBJCOPY} --localize-hidden ${static_object}
  COMMAND ${CMAKE_COMMAND} -E rm -f ${MEGAMOE_ARCHIVE}
  COMMAND ${CMAKE_AR} rcs ${MEGAMOE_ARCHIVE} ${static_object}
  DEPENDS ${layer_objects} ${MM_LAYERS}
  COMMENT "Archiving libmegamoe.a"
  COMMAND_EXPAND_LISTS VERBATIM)
add_custom_target(megamoe_static ALL DEPENDS ${MEGAMOE_ARCHIVE})
