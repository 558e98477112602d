# SPDX-License-Identifier: Apache-2.0
# The scdoc source of megamoe-formats(5), whose comment names the place of docs/formats.md:
#   awk -f formats.awk man/megamoe-formats.5.scd docs/formats.md
# It knows the Markdown of that document: headings, paragraphs, lists, code, bold, links, tables.

FILENAME ~ /\.scd$/ {
    if ($0 == "; docs/formats.md")
        behind = 1
    else if (behind)
        tail = tail $0 "\n"
    else
        print
    next
}

function escaped(text) {
    gsub(/\\/, "\\\\", text)
    gsub(/[*_]/, "\\\\&", text)
    return text
}

# Code and bold become bold, which does not nest: bold around code is the code.
function inline(text,    parts, n, i, out, pair) {
    gsub(/\*\*`/, "`", text)
    gsub(/`\*\*/, "`", text)
    while (match(text, /\[[^]]*\]\([^)]*\)/)) {
        pair = substr(text, RSTART + 1, RLENGTH - 2)
        sub(/\]\(.*/, "", pair)
        text = substr(text, 1, RSTART - 1) pair substr(text, RSTART + RLENGTH)
    }
    n = split(text, parts, "`")
    for (i = 1; i <= n; i++)
        out = out (i % 2 ? bold(parts[i]) : parts[i] == "" ? "" : "*" escaped(parts[i]) "*")
    return out
}

function bold(text,    parts, n, i, out) {
    n = split(text, parts, /\*\*/)
    for (i = 1; i <= n; i++)
        out = out (i % 2 ? escaped(parts[i]) : "*" escaped(parts[i]) "*")
    return out
}

# A bar inside code is written \|.
function row(line,    cells, n, i, text) {
    gsub(/\\\|/, "\001", line)
    sub(/^\| */, "", line)
    sub(/ *\| *$/, "", line)
    n = split(line, cells, / *\| */)
    for (i = 1; i <= n; i++) {
        text = cells[i]
        gsub(/\001/, "|", text)
        text = inline(text)
        if (!table && text != "" && text !~ /\*/)
            text = "*" text "*"
        printf "%s%s%s\n", i == 1 ? (table ? "|" : "[") : ":", table ? " " : "[", \
            text == "" ? "" : " " text
    }
    table = 1
}

/^```/ {
    code = !code
    print
    next
}
code { print; next }
/^\|[-:| ]+\|$/ { next }
/^\|/ { row($0); next }
{ table = 0 }
/^##?#? / {
    level = index($0, " ") - 1
    text = substr($0, level + 2)
    gsub(/`/, "", text)
    print (level > 2 ? "## " text : "# " toupper(text))
    next
}
{
    text = inline($0)
    print (text ~ /^[][|]/ ? "\\" : "") text # no table
}

END { printf "%s", tail }
