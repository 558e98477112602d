/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

enum { MAX_OPTIONS = 48, HELP_CODE = MAX_OPTIONS, FIRST_CODE = 256 };

static void print_help(const command_syntax *syntax) {
    printf("%s\n\nusage: megamoe %s%s%s [options]\n\n", syntax->summary, syntax->name,
           *syntax->arguments ? " " : "", syntax->arguments);
    for (size_t i = 0; i < syntax->n_options; i++) {
        const option_spec *option = &syntax->options[i];
        char left[64];
        snprintf(left, sizeof left, "--%s %s", option->name, option->value ? option->value : "");
        printf("  %-26s %s\n", left, option->help);
    }
    printf("  %-26s %s\n\nexample:\n  %s\n", "--help", "show this text", syntax->example);
}

/* The index of a word in "word|word", or -1. */
static int find_choice(const char *words, const char *word) {
    const size_t length = strlen(word);
    int index = 0;
    for (const char *at = words; at != NULL; index++) {
        const size_t n = strcspn(at, "|");
        if (n == length && strncmp(at, word, n) == 0)
            return index;
        at = at[n] == '|' ? at + n + 1 : NULL;
    }
    return -1;
}

static bool in_range(const option_spec *option, double value) {
    return value >= option->min && value <= option->max;
}

bool option_set(const option_spec *option, const char *text) {
    char *end = NULL;
    errno = 0;
    switch (option->kind) {
    case OPTION_FLAG:
        *(bool *)option->target = true;
        return true;
    case OPTION_INTEGER: {
        const long long value = strtoll(text, &end, 10);
        if (end == text || *end != '\0' || errno != 0 || !in_range(option, (double)value))
            break;
        *(int64_t *)option->target = value;
        return true;
    }
    case OPTION_NUMBER: {
        const double value = strtod(text, &end);
        if (end == text || *end != '\0' || !isfinite(value) || !in_range(option, value))
            break;
        *(double *)option->target = value;
        return true;
    }
    case OPTION_TEXT:
        *(const char **)option->target = text;
        return true;
    case OPTION_LIST: {
        option_list *list = option->target;
        if (list->n == OPTION_MAX_LIST) {
            report_error("--%s %s: expected at most %d of these", option->name, text,
                         OPTION_MAX_LIST);
            return false;
        }
        list->items[list->n++] = text;
        return true;
    }
    case OPTION_CHOICE: {
        const int value = find_choice(option->value, text);
        if (value < 0) {
            report_error("--%s %s: not one of %s", option->name, text, option->value);
            return false;
        }
        *(int *)option->target = value;
        return true;
    }
    }
    report_error("--%s %s: not a number from %.15g to %.15g", option->name, text, option->min,
                 option->max);
    return false;
}

/* Copies the index-th word of "word|word", which is there. */
static void copy_choice(const char *words, int index, char *text, size_t bytes) {
    for (; index > 0; index--)
        words += strcspn(words, "|") + 1;
    snprintf(text, bytes, "%.*s", (int)strcspn(words, "|"), words);
}

bool option_get(const option_spec *option, char buffer[OPTION_TEXT_BYTES], const char **text) {
    *text = buffer;
    switch (option->kind) {
    case OPTION_FLAG:
        buffer[0] = '\0';
        return *(const bool *)option->target;
    case OPTION_INTEGER: {
        const int64_t value = *(const int64_t *)option->target;
        snprintf(buffer, OPTION_TEXT_BYTES, "%" PRId64, value);
        return in_range(option, (double)value);
    }
    case OPTION_NUMBER: {
        const double value = *(const double *)option->target;
        snprintf(buffer, OPTION_TEXT_BYTES, "%.17g", value);
        return in_range(option, value);
    }
    case OPTION_TEXT:
        *text = *(const char *const *)option->target;
        return *text != NULL;
    case OPTION_CHOICE: {
        const int value = *(const int *)option->target;
        if (value < 0)
            return false;
        copy_choice(option->value, value, buffer, OPTION_TEXT_BYTES);
        return true;
    }
    case OPTION_LIST:
        break;
    }
    return false;
}

const option_spec *option_find(const option_spec *options, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(options[i].name, name) == 0)
            return &options[i];
    return NULL;
}

bool options_parse(const command_syntax *syntax, int argc, char **argv,
                   const char *arguments[OPTION_MAX_ARGUMENTS], int *exit_code) {
    struct option table[MAX_OPTIONS + 2] = {0};
    for (size_t i = 0; i < syntax->n_options; i++)
        table[i] = (struct option){syntax->options[i].name, syntax->options[i].kind != OPTION_FLAG,
                                   NULL, FIRST_CODE + (int)i};
    table[syntax->n_options] = (struct option){"help", no_argument, NULL, FIRST_CODE + HELP_CODE};

    *exit_code = EXIT_BAD_INPUT;
    opterr = 0;
    optind = 0;
    int code;
    while ((code = getopt_long(argc, argv, ":", table, NULL)) != -1) {
        if (code == FIRST_CODE + HELP_CODE) {
            print_help(syntax);
            *exit_code = EXIT_DONE;
            return false;
        }
        if (code < FIRST_CODE) {
            report_error("%s: %s %s (see megamoe %s --help)", syntax->name, argv[optind - 1],
                         code == ':' ? "needs a value" : "is no option of this command",
                         syntax->name);
            return false;
        }
        if (!option_set(&syntax->options[code - FIRST_CODE], optarg))
            return false;
    }
    const int n = argc - optind;
    if (n < syntax->min_arguments || n > syntax->max_arguments) {
        if (n > syntax->max_arguments)
            report_error("%s: unexpected argument %s (see megamoe %s --help)", syntax->name,
                         argv[optind + syntax->max_arguments], syntax->name);
        else
            report_error("%s: %s is missing (see megamoe %s --help)", syntax->name,
                         syntax->arguments, syntax->name);
        return false;
    }
    for (int i = 0; i < OPTION_MAX_ARGUMENTS; i++)
        arguments[i] = i < n ? argv[optind + i] : NULL;
    return true;
}
