#!/usr/bin/env python3
"""Writes the man page and the bash completion from what the command says of itself: one text, three places.

Usage: make_docs.py MEGAMOE man|bash OUTPUT, or make_docs.py --compress FILE
"""

import gzip
import json
import subprocess
import sys


def roff(text):
    """Text that roff shows as it is: its own characters escaped, hyphens as typed ones, no line a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in text.split("\n"))


def man_option(option):
    argument = f" \\fI{roff(option['argument'])}\\fR" if option["argument"] else ""
    return f".TP\n\\fB\\-\\-{roff(option['name'])}\\fR{argument}\n{roff(option['help'])}\n"


def man_command(command):
    summary = command["summary"]
    yield f".SS \"megamoe {roff(command['name'])} {roff(command['words'])}\"\n"
    yield f"{roff(summary[0].upper() + summary[1:])}.\n.PP\n{roff(command['details'])}\n"
    yield from (man_option(o) for o in command["options"] if o["name"] not in ("help", "json"))
    yield ".PP\nExample:\n.PP\n.nf\n" + roff(command["examples"].rstrip("\n")) + "\n.fi\n"


MAN_HEAD = """.TH MEGAMOE 1 "" "megamoe {version}" "User Commands"
.SH NAME
megamoe \\- run and check NVFP4 Mixture\\-of\\-Experts layers of published checkpoints
.SH SYNOPSIS
\\fBmegamoe\\fR \\fICOMMAND\\fR [\\fIOPTION\\fR]...
.br
\\fBmegamoe\\fR \\-\\-help | \\-\\-version
.SH DESCRIPTION
Runs the NVFP4 Mixture\\-of\\-Experts layers of published checkpoints, and shows that they are right.
Every command takes \\fB\\-\\-json\\fR, which prints JSON for other programs, and \\fB\\-\\-help\\fR.
"""


def man(help_):
    yield MAN_HEAD.format(version=help_["version"])
    yield ".SH COMMANDS\n"
    for command in help_["commands"]:
        yield from man_command(command)
    yield ".SH EXIT STATUS\n0 good, 1 the check failed, 2 bad usage or bad input.\n.SH ENVIRONMENT\n"
    for variable in help_["environment"]:
        yield f".TP\n\\fB{variable['name']}\\fR\n{roff(variable['help'])}\n"


BASH = """# bash completion of megamoe {version}; made by make_docs.py from the command's own help.
_megamoe() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} options=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "{commands} help --help --version" -- "$word")
        return
    fi
    case ${{COMP_WORDS[1]}}:$before in
{values}    esac
    case ${{COMP_WORDS[1]}} in
    help) options="{commands}" ;;
{options}    esac
    if [ "${{word:0:1}}" = - ] || [ "${{COMP_WORDS[1]}}" = help ]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}}
complete -o filenames -F _megamoe megamoe
"""


def bash_values(command):
    """After an option with a list of words, these; after another that wants a number or a name, nothing."""
    for option in command["options"]:
        if not option["argument"] or option["argument"] == "FILE":
            continue
        words = " ".join(option["words"] or [])
        reply = f'mapfile -t COMPREPLY < <(compgen -W "{words}" -- "$word")\n        return' if words else "return"
        yield f"    {command['name']}:--{option['name']})\n        {reply} ;;\n"


def bash(help_):
    commands = help_["commands"]
    options = "".join(
        f"    {c['name']}) options=\"{' '.join('--' + o['name'] for o in c['options'])}\" ;;\n" for c in commands
    )
    values = "".join(line for c in commands for line in bash_values(c))
    names = " ".join(c["name"] for c in commands)
    yield BASH.format(version=help_["version"], commands=names, values=values, options=options)


def main(megamoe, kind, output):
    text = subprocess.run([megamoe, "--help", "--json"], stdout=subprocess.PIPE, check=True).stdout
    with open(output, "w", encoding="utf-8") as file:
        file.writelines({"man": man, "bash": bash}[kind](json.loads(text)))


def compress(path):
    """FILE.gz, the same bytes every time."""
    with open(path, "rb") as file, open(path + ".gz", "wb") as out:
        out.write(gzip.compress(file.read(), 9, mtime=0))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--compress":
        sys.exit(compress(sys.argv[2]))
    if len(sys.argv) != 4 or sys.argv[2] not in ("man", "bash"):
        sys.exit(__doc__.strip())
    main(*sys.argv[1:])
