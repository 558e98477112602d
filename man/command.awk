# SPDX-License-Identifier: Apache-2.0
# The scdoc source of one command's page, from that command's section of megamoe(1):
#   awk -v command=run -f command.awk tools/commands.h man/megamoe.1.scd
# The first file has the command's summary; of the second every page repeats the options that all
# commands know, and what follows the commands.

FILENAME ~ /\.h$/ {
    if (match($0, "X\\(" command ", \"[^\"]*\"")) {
        start = length("X(" command ", \"")
        summary = substr($0, RSTART + start, RLENGTH - start - 1)
        sub(/\.$/, "", summary)
        summary = tolower(substr(summary, 1, 1)) substr(summary, 2)
    }
    next
}

/^# / {
    section = substr($0, 3)
    mine = 0
}
/^## / {
    mine = $2 == command
    arguments = ""
    for (i = 3; i <= NF; i++)
        arguments = arguments " " $i
    gsub(/[A-Z]+/, "_&_", arguments)
    if (mine) {
        found = 1
        printf "megamoe-%s(1)\n\n# NAME\n\nmegamoe-%s - %s\n", command, command, summary
        printf "\n# SYNOPSIS\n\n*megamoe %s*%s [_options_]\n\n# DESCRIPTION\n", command, arguments
    }
    next
}

section == "DESCRIPTION" && /^\*--/ { common = 1 }
section == "DESCRIPTION" && common { common_options = common_options $0 "\n" }

mine && !has_options && /^\*--/ {
    print "# OPTIONS\n"
    has_options = 1
}
mine { print }

section == "EXIT STATUS" || section == "ENVIRONMENT" { rest = rest $0 "\n" }

END {
    if (!found || summary == "") {
        print "command.awk: " command " has no section or no summary" >"/dev/stderr"
        exit 1
    }
    if (!has_options)
        print "# OPTIONS\n"
    printf "%s%s# SEE ALSO\n\n*megamoe*(1), *megamoe-formats*(5)\n", common_options, rest
}
