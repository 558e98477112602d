# SPDX-License-Identifier: Apache-2.0
# megamoe(1) is written by hand. Each command's page is its section of megamoe(1), and
# megamoe-formats(5) holds docs/formats.md, so that none can say something else than its source.
find_program(SCDOC scdoc)
if(NOT SCDOC)
  return()
endif()

set(man_dir ${PROJECT_BINARY_DIR}/man)
file(MAKE_DIRECTORY ${man_dir})
set(man_pages)

# man_page(NAME SECTION INPUT... [AWK PROGRAM ARGUMENT...]): the scdoc source is the input, or what
# the program makes of the inputs.
function(man_page name section)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "AWK")
  set(inputs ${arg_UNPARSED_ARGUMENTS})
  set(page ${man_dir}/${name}.${section})
  if(arg_AWK)
    list(POP_FRONT arg_AWK program)
    set(source ${page}.scd)
    add_custom_command(OUTPUT ${source}
      COMMAND awk ${arg_AWK} -f ${program} ${inputs} > ${source}
      DEPENDS ${program} ${inputs} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM)
  else()
    set(source ${inputs})
  endif()
  add_custom_command(OUTPUT ${page}
    COMMAND ${SCDOC} < ${source} > ${page}
    DEPENDS ${source} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    COMMENT "Formatting ${name}(${section})" VERBATIM)
  install(FILES ${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section})
  set(man_pages ${man_pages} ${page} PARENT_SCOPE)
endfunction()

set(man_source ${PROJECT_SOURCE_DIR}/man)
set(overview ${man_source}/megamoe.1.scd)
set(commands_header ${PROJECT_SOURCE_DIR}/tools/commands.h)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${commands_header})
file(READ ${commands_header} header_text)
string(REGEX MATCHALL "X\\([a-z]+, \"" command_starts "${header_text}")

man_page(megamoe 1 ${overview})
foreach(start IN LISTS command_starts)
  string(REGEX MATCH "[a-z]+" command ${start})
  man_page(megamoe-${command} 1 ${commands_header} ${overview}
    AWK ${man_source}/command.awk -v command=${command})
endforeach()
man_page(megamoe-formats 5 ${man_source}/megamoe-formats.5.scd ${PROJECT_SOURCE_DIR}/docs/formats.md
  AWK ${man_source}/formats.awk)
add_custom_target(man ALL DEPENDS ${man_pages})
