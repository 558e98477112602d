# SPDX-License-Identifier: Apache-2.0
# Runs nvcc, keeps what it says in LOG and, with CHECK, refuses a kernel that ptxas could not compile
# well:
#   cmake -DCUBIN=file -DLOG=file -DCHECK=ON -P compile_cubin.cmake -- NVCC ARGUMENT...
set(command "")
set(after_dashes FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
  if(after_dashes)
    list(APPEND command "${CMAKE_ARGV${i}}")
  elseif(CMAKE_ARGV${i} STREQUAL "--")
    set(after_dashes TRUE)
  endif()
endforeach()

execute_process(COMMAND ${command} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
file(WRITE ${LOG} "${text}")

function(refuse why)
  file(REMOVE ${CUBIN})
  message("${text}")
  message(FATAL_ERROR " ${CUBIN}:\n ${why}")
endfunction()

if(NOT result EQUAL 0)
  refuse("nvcc failed: ${result}")
endif()
if(NOT CHECK)
  return()
endif()
# C7510, C7513, C7514 and others: "Potential Performance Loss: wgmma.mma_async instructions are
# serialized due to ..."; C7508: "... 'setmaxnreg' ignored ...".
if(text MATCHES "[^\n]*(Potential Performance Loss|C7508|C7510|C7513|C7514)[^\n]*")
  refuse("${CMAKE_MATCH_0}")
endif()
if(text MATCHES "[1-9][0-9]* bytes (stack frame|spill stores|spill loads|lmem)")
  refuse("local memory: ${CMAKE_MATCH_0}")
endif()
if(NOT text MATCHES "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
  refuse("ptxas -v reported no function")
endif()
