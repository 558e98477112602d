/* SPDX-License-Identifier: Apache-2.0 */
/* Pictures through gnuplot, which is looked for in PATH when one is drawn. */
#ifndef GNUPLOT_H
#define GNUPLOT_H

#include <stdio.h>

/*
 * Runs gnuplot over `script`, read from its beginning, with its output as the file `out`, which
 * appears whole or not at all. Prints its error and returns an exit code.
 */
int gnuplot_draw(FILE *script, const char *out);

#endif
