/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe convert: the expert layers of a checkpoint as another family stores them. */
#include <inttypes.h>
#include <megamoe/megamoe.h>
#include <stdio.h>

#include "commands.h"
#include "options.h"
#include "progress.h"
#include "report.h"

static int report(const char *in, const char *out, const megamoe_checkpoint_info *from,
                  const megamoe_checkpoint *made, bool json) {
    megamoe_checkpoint_info to = MEGAMOE_INIT(megamoe_checkpoint_info);
    megamoe_stored_layer layer = MEGAMOE_INIT(megamoe_stored_layer);
    TRY_LIBRARY(megamoe_checkpoint_describe(made, &to));
    TRY_LIBRARY(megamoe_checkpoint_stored(made, megamoe_checkpoint_layer(made, 0), &layer));
    if (json)
        return report_json(json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:I, s:I, s:I}", "path", in,
                                     "out", out, "from", from->family, "to", to.family, "format",
                                     layer.format, "layers", to.layers, "files",
                                     (json_int_t)to.files, "tensors", (json_int_t)to.tensors,
                                     "bytes", (json_int_t)to.bytes));
    char size[REPORT_SIZE_BYTES];
    report_line("wrote", "%s: %" PRIu64 " file%s, %" PRIu64 " tensors, %s", out, to.files,
                to.files == 1 ? "" : "s", to.tensors, report_size(to.bytes, size));
    report_line("converted", "%" PRId32 " layer%s of %s to %s, %s", to.layers,
                to.layers == 1 ? "" : "s", from->family, to.family, layer.format);
    return EXIT_DONE;
}

static int convert(const megamoe_checkpoint *checkpoint, const char *in, const char *out,
                   const char *family, int format, bool json) {
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    TRY_LIBRARY(megamoe_checkpoint_describe(checkpoint, &info));
    progress bar;
    megamoe_convert_options options = MEGAMOE_INIT(megamoe_convert_options);
    options.family = family;
    options.format = (megamoe_format)(format + 1);
    options.progress = progress_begin(&bar, "convert");
    const megamoe_status status = megamoe_checkpoint_convert(checkpoint, &options, out);
    progress_end(&bar);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    megamoe_checkpoint *made;
    TRY_LIBRARY(megamoe_checkpoint_open(out, &made));
    const int code = report(in, out, &info, made, json);
    megamoe_checkpoint_close(made);
    return code;
}

int cmd_convert(int argc, char **argv) {
    static const char *const families[] = {"deepseek-v4", "modelopt-nvfp4", "compressed-tensors",
                                           "gpt-oss"};
    int family = -1, format = -1;
    bool json = false;
    const option_spec options[] = {{"to", OPTION_CHOICE, &family,
                                    "deepseek-v4|modelopt-nvfp4|compressed-tensors|gpt-oss",
                                    "family to write", 0, 0},
                                   {"format", OPTION_CHOICE, &format, "mxfp4|nvfp4",
                                    "(as stored, or the family's only one)", 0, 0},
                                   OPTION_JSON(&json)};
    const command_syntax syntax = {
        "convert",
        "PATH DIR",
        "Writes the expert layers of a checkpoint, GGUF too, as another family stores "
        "them, without loss.",
        "megamoe convert flash flash-nvfp4 --to modelopt-nvfp4",
        options,
        sizeof options / sizeof *options,
        2,
        2};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    if (family < 0)
        return report_error("convert: --to is missing");
    megamoe_checkpoint *checkpoint;
    TRY_LIBRARY(megamoe_checkpoint_open(arguments[0], &checkpoint));
    code = convert(checkpoint, arguments[0], arguments[1], families[family], format, json);
    megamoe_checkpoint_close(checkpoint);
    return code;
}
