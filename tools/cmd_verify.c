/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe verify: the hashes of a prepared file. */
#include <inttypes.h>

#include "commands.h"
#include "options.h"
#include "progress.h"
#include "report.h"
#include "source.h"

int cmd_verify(int argc, char **argv) {
    bool json = false;
    const option_spec options[] = {OPTION_JSON(&json)};
    const command_syntax syntax = {"verify",
                                   "FILE",
                                   "Compares the hashes of a prepared file with its bytes.",
                                   "megamoe verify layer-000.mmoe",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    source s;
    code = source_open(arguments[0], &s);
    if (code == EXIT_DONE && !s.prepared)
        code = report_error("%s: is a checkpoint; only prepared files hold hashes", s.path);
    if (code == EXIT_DONE)
        code = source_open_layer(&s, ONLY_LAYER);
    if (code != EXIT_DONE) {
        source_close(&s);
        return code;
    }
    progress bar;
    const megamoe_status status = megamoe_weights_verify(s.weights, progress_begin(&bar, "verify"));
    progress_end(&bar);
    if (status != MEGAMOE_OK)
        code = report_failure(status);
    if (json && code != EXIT_BAD_INPUT)
        report_json(json_pack("{s:s, s:b, s:i, s:i}", "path", s.path, "whole", code == EXIT_DONE,
                              "layer", s.layer.layer, "experts", s.layer.experts));
    else if (code == EXIT_DONE)
        report_line("verified", "%s: layer %" PRId32 ", the hashes of all %" PRId32 " experts hold",
                    s.path, s.layer.layer, s.layer.experts);
    source_close(&s);
    return code;
}
