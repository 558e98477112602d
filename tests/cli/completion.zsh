# SPDX-License-Identifier: Apache-2.0
# For an interactive zsh without other settings: Tab writes what the completion would add to
# $HITS, a word a line, then a line "END".
PROMPT='ready> '
fpath=($COMPLETIONS $fpath)
autoload -Uz compinit && compinit -u -D

compadd() {
    # What is stored in an array or comes from one is the completion system's own calculation.
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a added
    builtin compadd -A added "$@"
    (( ! $#added )) || print -rl -- $added >>$HITS
    builtin compadd "$@"
}

write_hits() {
    _main_complete
    print END >>$HITS
    compstate[insert]= compstate[list]=
}
zle -C write-hits complete-word write_hits
bindkey '^I' write-hits
