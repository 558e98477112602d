# SPDX-License-Identifier: Apache-2.0
# The CUDA backend's kernels: nvcc makes cubins ahead of time, which the library embeds. Nothing of
# the toolkit is linked. Sets MM_NVCC, empty for a build without kernels, and MM_NVCC_VERSION.
set(MEGAMOE_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (where nvcc is found), ON, OFF")
set_property(CACHE MEGAMOE_CUDA PROPERTY STRINGS AUTO ON OFF)

# For packages: compiling takes minutes.
set(MEGAMOE_CUBINS "" CACHE PATH "Embed the cubins of this folder, of another build, instead of compiling")

option(MEGAMOE_CUDA_CHECK "Refuse kernels that spill or whose multiplications are serialized" ON)

set(MM_NVCC "")
set(MM_NVCC_VERSION 0.0)
set(nvcc_least 12.0) # the first with wgmma
if(NOT MEGAMOE_CUDA STREQUAL "OFF")
  find_program(NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(NVCC)
  if(NVCC)
    execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE nvcc_text)
    if(nvcc_text MATCHES "release ([0-9]+\\.[0-9]+)")
      set(MM_NVCC_VERSION ${CMAKE_MATCH_1})
    endif()
    if(MM_NVCC_VERSION VERSION_GREATER_EQUAL nvcc_least)
      set(MM_NVCC ${NVCC})
    endif()
  endif()
  if(MM_NVCC)
    message(STATUS "CUDA kernels: ${MM_NVCC} ${MM_NVCC_VERSION}")
  elseif(NVCC)
    set(nvcc_lack "${NVCC} is ${MM_NVCC_VERSION}, older than ${nvcc_least}")
  else()
    set(nvcc_lack "no nvcc in PATH, CUDA_HOME or /usr/local/cuda")
  endif()
  if(nvcc_lack AND MEGAMOE_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA kernels: not built, ${nvcc_lack}")
  elseif(nvcc_lack)
    message(FATAL_ERROR "MEGAMOE_CUDA is ${MEGAMOE_CUDA}, but ${nvcc_lack}")
  endif()
endif()

# Floating point is part of the contract, as it is for C: no contraction, no flushing, IEEE division.
set(MM_NVCC_FLAGS
  -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17
  -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
  -Werror all-warnings -Xptxas -v
  -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src)

# mm_cubin(NAME name SOURCE file.cu DEFINES NAME=VALUE...)
# Adds one cubin to MM_CUBINS in the caller's scope, and the log of its compilation to the global
# property MM_CUBIN_LOGS. The build fails where ptxas reports local memory or serialized
# multiplications, unless MEGAMOE_CUDA_CHECK is off.
function(mm_cubin)
  cmake_parse_arguments(arg "" "NAME;SOURCE" "DEFINES" ${ARGN})
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/${arg_SOURCE})
  set(cubin ${CMAKE_CURRENT_BINARY_DIR}/cubins/${arg_NAME}.cubin)
  set(log ${CMAKE_CURRENT_BINARY_DIR}/cubins/${arg_NAME}.log)
  list(TRANSFORM arg_DEFINES PREPEND -D)
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/cubins)
  add_custom_command(
    OUTPUT ${cubin}
    BYPRODUCTS ${log}
    COMMAND ${CMAKE_COMMAND} -DCUBIN=${cubin} -DLOG=${log} -DCHECK=${MEGAMOE_CUDA_CHECK}
      -P ${PROJECT_SOURCE_DIR}/cmake/compile_cubin.cmake --
      ${MM_NVCC} -cubin ${MM_NVCC_FLAGS} ${arg_DEFINES}
      -MD -MF ${cubin}.d -MT ${cubin} -o ${cubin} ${source}
    DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/compile_cubin.cmake
    DEPFILE ${cubin}.d
    COMMENT "Building cubin ${arg_NAME}"
    VERBATIM)
  set(MM_CUBINS ${MM_CUBINS} ${cubin} PARENT_SCOPE)
  set_property(GLOBAL APPEND PROPERTY MM_CUBIN_LOGS ${log})
endfunction()
