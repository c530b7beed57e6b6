"""The man page and the bash completion are complete, because the command itself says what there is."""

import json
import os
import shutil
import subprocess
import unittest

from command import MEGAMOE, Case

BUILD = os.path.dirname(MEGAMOE)
MAN, COMPLETION = os.path.join(BUILD, "megamoe.1"), os.path.join(BUILD, "megamoe.bash")


class Docs(Case):
    def setUp(self):
        super().setUp()
        self.help = json.loads(self.command("--help", "--json"))

    def test_help_of_one_command(self):
        for command in self.help["commands"]:
            self.assertEqual(self.json(command["name"], "--help"), command)
            text = self.command(command["name"], "--help")
            for option in command["options"]:
                self.assertIn(f"  --{option['name']}", text)

    def test_man_page(self):
        with open(MAN, encoding="utf-8") as file:
            source = file.read()
        for command in self.help["commands"]:
            section = source.split(f'.SS "megamoe {command["name"]} ')[1].split(".SS")[0]
            for option in command["options"]:
                if option["name"] not in ("help", "json"):
                    self.assertIn("\\fB\\-\\-" + option["name"].replace("-", "\\-") + "\\fR", section)
        for variable in self.help["environment"]:
            self.assertIn(variable["name"], source.split(".SH ENVIRONMENT")[1])
        if not shutil.which("groff"):
            return
        done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", MAN], capture_output=True, text=True, check=True)
        self.assertEqual(done.stderr, "")
        self.assertIn("quantize", done.stdout)

    def complete(self, *words):
        """What bash would offer for the last word."""
        script = f'. "{COMPLETION}"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _megamoe; '
        script += 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script, "bash", "megamoe", *words], capture_output=True, text=True,
                              check=True, cwd=self.directory)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_completion(self):
        names = [command["name"] for command in self.help["commands"]]
        self.assertEqual(self.complete("")[: len(names)], names)
        self.assertEqual(self.complete("qu"), ["quantize"])
        self.assertEqual(self.complete("help", "be"), ["bench"])
        self.assertEqual(self.complete("synth", "--format", "fused"), ["fused", "fused-transposed"])
        self.assertIn("sm90", self.complete("run", "c", "--backend", ""))
        self.assertEqual(self.complete("run", "c", "--layer", ""), [])
        for command in self.help["commands"]:
            offered = self.complete(command["name"], "--")
            self.assertEqual(offered, ["--" + option["name"] for option in command["options"]])
        with open(self.path("model.safetensors"), "w", encoding="utf-8"):
            pass
        self.assertEqual(self.complete("inspect", "mod"), ["model.safetensors"])
        self.assertEqual(self.complete("run", "c", "--input", "mod"), ["model.safetensors"])


if __name__ == "__main__":
    unittest.main()
