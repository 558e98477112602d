# SPDX-License-Identifier: Apache-2.0
# Writes a header with the commit that is checked out, where that has changed since:
#   cmake -DSOURCE=directory -DHEADER=file -P commit.cmake
find_program(GIT git)
set(commit "")
if(GIT AND EXISTS ${SOURCE}/.git)
  execute_process(COMMAND ${GIT} -C ${SOURCE} describe --always --dirty=+ --abbrev=12 --exclude *
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "/* SPDX-License-Identifier: Apache-2.0 */
#define MM_COMMIT \"${commit}\"
")
