"""moecachectl as people use it: exit codes, JSON, and `run` with programs that need no llama.cpp."""
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import unittest
from pathlib import Path

import harness
from harness import CTL, DEADLINE_S, Daemon, wait_for


def ctl(*args, environment=None):
    return subprocess.run([CTL, *map(str, args)], capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, **(environment or {})})


class ExitCodes(unittest.TestCase):
    def test_bad_command_lines_are_two(self):
        for args in ((), ("nonsense",), ("status", "--nonsense"), ("-o", "xml", "status"), ("policy",), ("drop", "one"), ("run",),
                     ("run", "--"), ("status", "--", "x"), ("stats", "--count", "3")):
            self.assertEqual(ctl(*args).returncode, 2, args)

    def test_help_names_the_exit_codes(self):
        done = ctl("--help")
        self.assertEqual(done.returncode, 0)
        self.assertIn("3 no daemon answers", done.stdout)

    def test_no_daemon_is_three_for_every_command_and_says_where(self):
        for command in (["status"], ["models"], ["sessions"], ["stats"], ["stats", "--watch"], ["doctor"], ["policy", "get"],
                        ["policy", "set", "lru"], ["register", "x"], ["drop", "1"]):
            done = ctl("--socket", "/nowhere/control.sock", *command)
            self.assertEqual(done.returncode, 3, command)
            self.assertIn("/nowhere/control.sock", done.stderr)

    def test_refusals_are_four(self):
        with Daemon() as daemon:
            for command in (["drop", 7], ["policy", "set", "best"], ["policy", "get", "--model", 7], ["register", "/nowhere/x.gguf"]):
                done = ctl("--socket", daemon.directory / "control.sock", *command)
                self.assertEqual(done.returncode, 4, (command, done.stderr))
                self.assertNotEqual(done.stderr, "")

    def test_a_daemon_that_does_not_answer_is_five(self):
        with Daemon() as daemon:
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                done = ctl("--socket", daemon.directory / "control.sock", "--timeout", "0.3", "status")
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            self.assertEqual(done.returncode, 5, done.stderr)

    def test_a_socket_of_somebody_else_is_four(self):
        if os.geteuid() != 0:
            self.skipTest("needs root, to become somebody else")
        with Daemon() as daemon:
            daemon.directory.chmod(0o755)
            # Somebody else cannot run a program below /root, where a newcomer may have built it.
            program = shutil.copy(CTL, daemon.directory / "moecachectl")
            os.chmod(program, 0o755)
            done = subprocess.run([program, "--socket", daemon.directory / "control.sock", "status"], capture_output=True, text=True,
                                  user=65534, group=65534, extra_groups=[])
            self.assertEqual(done.returncode, 4, done.stderr)
            self.assertIn("not allowed", done.stderr)


class Json(unittest.TestCase):
    def test_every_command_prints_json(self):
        with Daemon("--pool-bytes", "64MiB") as daemon:
            model = daemon.ctl("register", str(harness.Q4_K))["model"]
            self.assertEqual(daemon.ctl("status")["pool_bytes_limit"], 64 << 20)
            self.assertEqual(daemon.ctl("status")["models"], 1)
            self.assertEqual(daemon.models()[0]["id"], model)
            self.assertGreater(len(daemon.models()[0]["layers"]), 0)
            self.assertEqual(daemon.sessions(), [])
            self.assertEqual(daemon.ctl("stats")["total"]["lookups"], 0)
            self.assertGreater(daemon.ctl("stats")["total"]["slots"], 0)
            self.assertIn("ssd", [finding["subject"] for finding in daemon.ctl("doctor")["findings"]])
            self.assertEqual(daemon.ctl("policy", "set", "lru", "--model", str(model))["spec"], "lru")
            self.assertEqual(daemon.ctl("policy", "get", "--model", str(model))["spec"], "lru")
            policies = daemon.ctl("policy", "get")["policies"]
            self.assertEqual([(policy["tier"], policy["model"], policy["spec"]) for policy in policies],
                             [("ram", 0, "slru"), ("ram", model, "lru")])
            self.assertEqual(daemon.ctl("version")["moecached"], daemon.ctl("version")["moecachectl"])
            self.assertEqual(daemon.ctl("drop", str(model)), {"model": model, "dropped": True})
            self.assertEqual(daemon.models(), [])

    def test_tiers_are_printed_back_in_full_and_follow_policy_set(self):
        with Daemon("--tiers", "RAM:LFU:8:64MiB,SSD:stream") as daemon:
            self.assertEqual(daemon.ctl("status")["tiers"], "RAM:lfu:8:64MiB:global,SSD:stream:32MiB")
            daemon.ctl("register", str(harness.Q4_K))
            self.assertEqual({layer["n_slots"] for layer in daemon.models()[0]["layers"]}, {8})
            self.assertEqual(daemon.models()[0]["policy"], "lfu")
            daemon.ctl("policy", "set", "ram", "ARC")
            self.assertEqual(daemon.ctl("status")["tiers"], "RAM:arc:8:64MiB:global,SSD:stream:32MiB")

    def test_errors_are_json_too(self):
        done = ctl("-o", "json", "--socket", "/nowhere/x", "status")
        self.assertEqual(json.loads(done.stdout)["exit_code"], 3)
        done = ctl("-o", "json", "status", "--nonsense")
        self.assertEqual(json.loads(done.stdout)["exit_code"], 2)

    def test_tables_of_a_model_show_name_and_sizes(self):
        with Daemon() as daemon:
            daemon.ctl("register", str(harness.Q4_K))
            for command in (["models"], ["models", "--layers"], ["stats"], ["status"]):
                done = ctl("--socket", daemon.directory / "control.sock", *command)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("MiB", done.stdout)
                self.assertEqual([line for line in done.stdout.splitlines() if line != line.rstrip()], [])


class Run(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(prefix="moecached-run-test-")
        self.addCleanup(self._folder.cleanup)
        self.folder = Path(self._folder.name)
        self.runtime = self.folder / "runtime"
        self.runtime.mkdir()
        self.plugin = self.folder / "plugin.so"
        self.plugin.write_bytes(b"")
        self.environment = {"XDG_RUNTIME_DIR": str(self.runtime), "MOECACHED_DAEMON": str(harness.DAEMON),
                            "MOECACHED_PLUGIN": str(self.plugin)}

    def program(self, name, text):
        path = self.folder / name
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def command(self, *args, socket="/nowhere/control.sock"):
        return [str(CTL), "--socket", str(socket), "run", *map(str, args)]

    def run_ctl(self, *args, socket="/nowhere/control.sock"):
        return subprocess.run(self.command(*args, socket=socket), capture_output=True, text=True, timeout=DEADLINE_S,
                              env={**os.environ, **self.environment})

    def start(self, *args):
        # A session of its own, as a shell gives its jobs a group: the test's own signals stay away.
        return subprocess.Popen(self.command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, **self.environment}, start_new_session=True)

    def leftovers(self):
        return list(self.runtime.iterdir())

    def test_llama_programs_get_environment_and_flags_from_a_private_daemon(self):
        program = self.program("llama-test", 'printf "%s\\n" "$GGML_BACKEND_PATH" "$MOECACHED_SOCKET" "$@"; test -S "$MOECACHED_SOCKET"')
        done = self.run_ctl("--pool-bytes", "64MiB", "--slots", "50%", "--policy", "lru", "--", program, "-m", "x.gguf")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], str(self.plugin))
        self.assertTrue(lines[1].startswith(str(self.runtime)), lines[1])
        self.assertEqual(lines[2:], ["-m", "x.gguf", "-ot", "\\.ffn_(gate|up|down|gate_up)_exps=MOECACHE"])
        self.assertEqual(self.leftovers(), [])

    def test_options_reach_the_private_daemon(self):
        program = self.program("llama-test", f'"{CTL}" -o json status; "{CTL}" policy get')  # by MOECACHED_CONTROL_SOCKET
        done = self.run_ctl("--pool-bytes", "64MiB", "--policy", "lru", "--", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        status, _, policy = done.stdout.rpartition("}")
        self.assertEqual(json.loads(status + "}")["pool_bytes_limit"], 64 << 20)
        self.assertRegex(policy, r"ram +new ones +lru\n")

    def test_tiers_reach_the_private_daemon_and_conflicts_come_back(self):
        program = self.program("tool", f'"{CTL}" -o json status')
        done = self.run_ctl("--tiers", "RAM:LFU:25%:64MiB,SSD:stream", "--", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["tiers"], "RAM:lfu:25%:64MiB:global,SSD:stream:32MiB")
        done = self.run_ctl("--tiers", "RAM:LFU:25%", "--slots", "8", "--", program)
        self.assertEqual(done.returncode, 125)
        self.assertIn("sets pool.slots, and so does --pool-slots", done.stderr + done.stdout)

    def test_other_programs_and_no_flags_get_the_environment_only(self):
        other = self.program("node", 'echo "$#"; test -n "$GGML_BACKEND_PATH"')
        self.assertEqual(self.run_ctl("--", other, "a").stdout, "1\n")
        llama = self.program("llama-test", 'echo "$#"; test -n "$GGML_BACKEND_PATH"')
        self.assertEqual(self.run_ctl("--no-flags", "--", llama, "a").stdout, "1\n")
        self.assertEqual(self.run_ctl("--", llama, "-ot", "exps=MOECACHE").stdout, "2\n")

    def test_a_running_daemon_is_used_and_left_alone(self):
        program = self.program("llama-test", 'echo "$MOECACHED_SOCKET"')
        with Daemon() as daemon:
            socket = daemon.directory / "control.sock"
            self.assertEqual(self.run_ctl("--", program, socket=socket).stdout.strip(), daemon.socket)
            self.assertIsNone(daemon.process.poll())
            self.assertTrue(self.run_ctl("--private", "--", program, socket=socket).stdout.startswith(str(self.runtime)))
            done = self.run_ctl("--pool-bytes", "1GiB", "--", program, socket=socket)
            self.assertEqual(done.returncode, 2)
            self.assertIn("--private", done.stderr)

    def test_the_exit_code_is_the_programs(self):
        self.assertEqual(self.run_ctl("--", self.program("a", "exit 42")).returncode, 42)
        self.assertEqual(self.run_ctl("--", self.program("b", "kill -KILL $$")).returncode, 128 + 9)
        self.assertEqual(self.leftovers(), [])

    def test_programs_that_cannot_run_are_126_and_127(self):
        self.assertEqual(self.run_ctl("--", "no-such-program-here").returncode, 127)
        data = self.folder / "data"
        data.write_text("x")
        self.assertEqual(self.run_ctl("--", data).returncode, 126)
        self.assertEqual(self.leftovers(), [])

    def test_a_missing_plugin_is_125_and_names_the_places(self):
        done = self.run_ctl("--plugin", "/nowhere/plugin.so", "--", "true")
        self.assertEqual(done.returncode, 125)
        self.assertIn("/nowhere/plugin.so", done.stderr)

    def test_a_daemon_that_cannot_start_is_125_with_its_own_words(self):
        done = self.run_ctl("--pool-bytes", "1", "--", "true")
        self.assertEqual(done.returncode, 125)
        self.assertIn("between 64KiB and", done.stderr)
        for option, value in (("--gpu-max-slowdown", "101"), ("--gpu-policy", "oracle"), ("--gpu-keep-free", "much")):
            done = self.run_ctl(option, value, "--", "true")
            self.assertEqual(done.returncode, 125)
            self.assertIn(value, done.stderr)
        self.assertEqual(self.leftovers(), [])

    def test_signals_are_forwarded_and_the_daemon_stops_last(self):
        program = self.program("llama-test", 'trap "test -S $MOECACHED_SOCKET && exit 5" TERM; echo ready; while :; do sleep 0.01; done')
        run = self.start("--", program)
        self.assertEqual(run.stdout.readline(), "ready\n")
        run.terminate()
        run.communicate(timeout=DEADLINE_S)
        self.assertEqual(run.returncode, 5)
        self.assertEqual(self.leftovers(), [])

    def test_when_it_is_killed_program_and_daemon_end_and_the_next_run_cleans_up(self):
        program = self.program("llama-test", 'echo $$; exec sleep 1000')
        run = self.start("--", program)
        child = int(run.stdout.readline())
        daemon = int(subprocess.run([CTL, "-o", "json", "--socket", self.leftovers()[0] / "control.sock", "status"],
                                    capture_output=True, check=True, text=True).stdout.split('"pid": ')[1].split(",")[0])
        run.kill()
        run.wait(DEADLINE_S)
        for pid in (child, daemon):
            wait_for(f"process {pid} to end", lambda: ended(pid))
        run.stdout.close()
        run.stderr.close()
        self.assertEqual(len(self.leftovers()), 1)
        self.assertEqual(self.run_ctl("--", "true").returncode, 0)
        self.assertEqual(self.leftovers(), [])

    def test_a_run_leaves_the_directory_of_a_living_one_alone(self):
        first = self.start("--", self.program("llama-test", "echo ready; exec sleep 1000"))
        self.assertEqual(first.stdout.readline(), "ready\n")
        self.assertEqual(self.run_ctl("--", "true").returncode, 0)
        self.assertEqual(len(self.leftovers()), 1)
        first.terminate()
        first.communicate(timeout=DEADLINE_S)
        self.assertEqual(first.returncode, 128 + signal.SIGTERM)
        self.assertEqual(self.leftovers(), [])

    def test_the_program_goes_on_when_the_private_daemon_dies(self):
        program = self.program("llama-test", f'kill -KILL $("{CTL}" -o json status | sed -n "s/.*\\"pid\\": \\([0-9]*\\),/\\1/p"); '
                                             'while test -e "/proc/$PPID" && ! grep -q . gone 2>/dev/null; do sleep 0.01; done; exit 6')
        run = subprocess.Popen(self.command("--", program), stderr=subprocess.PIPE, text=True, cwd=self.folder,
                               env={**os.environ, **self.environment})
        lines = []
        for line in run.stderr:
            lines.append(line)
            if "the private daemon ended" in line:
                (self.folder / "gone").write_text("yes\n")
        self.assertEqual(run.wait(DEADLINE_S), 6, lines)
        run.stderr.close()
        self.assertIn("the private daemon ended (137)", "".join(lines))
        self.assertEqual(self.leftovers(), [])


def ended(pid):
    """Gone, or a zombie that its new parent has not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


if __name__ == "__main__":
    unittest.main()
