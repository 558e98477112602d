# SPDX-License-Identifier: Apache-2.0
# Completion of megamoe for bash. Commands, options and values are read from the --help of the tool
# that is being typed, so what is offered is what that tool takes.

# The overview, or the help of a command, without its example.
_megamoe_help() {
    "$@" --help 2>/dev/null | while IFS= read -r line && [[ $line != example:* ]]; do
        printf '%s\n' "$line"
    done
}

# The models of synth --list, which has a heading.
_megamoe_models() {
    "$1" synth --list 2>/dev/null | {
        read -r _
        while read -r name _; do printf '%s\n' "$name"; done
    }
}

_megamoe_offer() {
    local word
    for word in "$@"; do
        [[ $word != "$current"* ]] || COMPREPLY+=("$word")
    done
}

# What may follow an option whose value --help calls $2: "word|word" are choices, words with
# capitals stand for something else, of which files and directories are known.
_megamoe_value() {
    local option=$1 part
    local -a parts
    if [[ $option == --model ]]; then
        mapfile -t parts < <(_megamoe_models "$tool")
    else
        IFS='|' read -ra parts <<<"$2"
    fi
    compopt +o default +o bashdefault
    for part in "${parts[@]}"; do
        case $part in
        FILE | PATH) compopt -o default ;;
        DIR) compopt -o dirnames ;;
        *[[:upper:]]*) ;;
        *) _megamoe_offer "$part" ;;
        esac
    done
}

_megamoe() {
    local tool=${COMP_WORDS[0]/#\~/$HOME} current=${COMP_WORDS[COMP_CWORD]}
    local command=${COMP_WORDS[1]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local line name rest arguments=
    local -A values=()
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        while read -r name rest; do
            _megamoe_offer "$name"
        done < <(_megamoe_help "$tool" | grep '^  [a-z]')
        _megamoe_offer --help --version
        compopt +o default +o bashdefault
        return
    fi

    while IFS= read -r line; do
        case $line in
        '  --'*)
            read -r name _ <<<"$line"
            rest=${line#"  $name "} # begins with the name of the value, for a flag with a space
            values[$name]=${rest%% *}
            ;;
        usage:*)
            arguments=${line#"usage: megamoe $command "}
            arguments=${arguments%'[options]'}
            ;;
        esac
    done < <(_megamoe_help "$tool" "$command")

    # --option=value is three words.
    if [[ $current == = ]]; then
        current=
    elif [[ $before == = ]] && ((COMP_CWORD > 3)); then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if [[ $before == --* && -n ${values[$before]-} ]]; then
        _megamoe_value "$before" "${values[$before]}"
    elif [[ $current == -* || -z $arguments ]]; then
        _megamoe_offer "${!values[@]}"
        compopt +o default +o bashdefault
    fi
}

complete -o bashdefault -o default -F _megamoe megamoe
