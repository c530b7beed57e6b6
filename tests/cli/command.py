"""Running the command in tests, and asking of every refusal what every refusal must have."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest

MEGAMOE = os.environ["MEGAMOE"]


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="megamoe-cli-")
        self.addCleanup(shutil.rmtree, self.directory)

    def path(self, *parts):
        return os.path.join(self.directory, *parts)

    def command(self, *arguments, status=0, env=None):
        """stdout of the command, which must end with `status`."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MEGAMOE_", "MEGA_MOE_"))}
        environment.update(env or {})
        done = subprocess.run(
            [MEGAMOE, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            cwd=self.directory,
        )
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        self.stderr = done.stderr
        return done.stdout

    def json(self, *arguments, status=0, env=None):
        return json.loads(self.command(*arguments, "--json", status=status, env=env))

    def refused(self, *arguments, names=(), status=None, env=None):
        """One sentence on stderr that has `names`; exit 2; nothing on stdout but the JSON error if asked; no file."""
        before = set(os.listdir(self.directory))
        out = self.command(*arguments, status=2, env=env)
        self.assertEqual(out, "")
        self.assertTrue(self.stderr.startswith("megamoe: "), self.stderr)
        self.assertEqual(self.stderr.count("\n"), 1, f"not one line: {self.stderr}")
        for name in names:
            self.assertIn(str(name), self.stderr)
        self.assertEqual(set(os.listdir(self.directory)), before, "a refused command left a file")
        error = self.json(*arguments, status=2, env=env)["error"]
        self.assertEqual("megamoe: " + error["message"] + "\n", self.stderr)
        self.assertRegex(error["message"], r"[^.?][.?]$")
        if status:
            self.assertEqual(error["status"], "MEGAMOE_" + status)
        return error["message"]


def close(got, want, relative):
    """Element by element; NaN equals NaN."""
    return len(got) == len(want) and all(
        abs(g - w) <= relative * abs(w) or (g != g and w != w) for g, w in zip(got, want)
    )


def contents(path):
    with open(path, "rb") as file:
        return file.read()
