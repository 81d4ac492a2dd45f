"""moecached as a process: exit codes, what it tells systemd, reload, and its log."""
import json
import os
import signal
import socket
import subprocess
import tempfile
import unittest
from pathlib import Path

from harness import CTL, DAEMON, DEADLINE_S, Daemon, wait_for


def run(*args, environment=None):
    return subprocess.run([DAEMON, *map(str, args)], capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, **(environment or {})})


class ExitCodes(unittest.TestCase):
    def test_bad_flags_and_files_are_two(self):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write("[pool]\nbites = 1\n")
            file.flush()
            for args in (["--nonsense"], ["--pool-bytes", "1"], ["--config", file.name], ["--config", file.name, "--check-config"],
                         ["--config", "/nowhere/x.toml"]):
                done = run(*args)
                self.assertEqual(done.returncode, 2, args)
                self.assertEqual(done.stdout, "")
            self.assertIn(f"{file.name}:2: pool.bites", run("--config", file.name).stderr)

    def test_checks_and_prints_are_zero(self):
        self.assertIn("ok", run("--config=/dev/null", "--check-config").stdout)
        printed = run("--config=/dev/null", "--print-config").stdout
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(printed)
            file.flush()
            again = run("--config", file.name, "--print-config")
            self.assertEqual((again.returncode, again.stdout), (0, printed), again.stderr)
        self.assertRegex(run("--version").stdout, r"^moecached \d+\.\d+\.\d+\n$")
        self.assertIn("Exit codes", run("--help").stdout)

    def test_a_second_daemon_is_three_and_the_first_goes_on(self):
        with Daemon() as daemon:
            second = run("--config=/dev/null", "--directory", daemon.directory)
            self.assertEqual(second.returncode, 3)
            self.assertIn(f"pid {daemon.process.pid}", second.stderr)
            self.assertTrue(daemon.answers())

    def test_another_program_on_a_socket_is_three_and_keeps_it(self):
        for name, kind in (("control.sock", socket.SOCK_STREAM), ("handle.sock", socket.SOCK_SEQPACKET)):
            with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, kind) as listener:
                path = Path(folder) / name
                listener.bind(str(path))
                listener.listen(8)
                done = run("--config=/dev/null", "--directory", folder)
                self.assertEqual(done.returncode, 3, done.stderr)
                self.assertIn(str(path), done.stderr)
                with socket.socket(socket.AF_UNIX, kind) as client:
                    client.connect(str(path))

    def test_what_cannot_start_is_four(self):
        done = run("--config=/dev/null", "--directory", "/nowhere/deep/moecached")
        self.assertEqual(done.returncode, 4)
        self.assertIn("/nowhere/deep/moecached", done.stderr)

    def test_a_stop_is_zero_for_both_signals_and_leaves_no_socket(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with Daemon() as daemon:
                daemon.process.send_signal(number)
                self.assertEqual(daemon.process.wait(DEADLINE_S), 0)
                self.assertEqual(list(daemon.directory.glob("*.sock")), [])

    def test_a_daemon_starts_over_the_sockets_of_a_killed_one(self):
        with Daemon() as daemon:
            daemon.kill()
            self.assertEqual(len(list(daemon.directory.glob("*.sock"))), 2)
            daemon.start()
            self.assertTrue(daemon.answers())


class ServiceManager(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.folder = Path(self._folder.name)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.notify.close)
        self.notify.bind(str(self.folder / "notify"))
        self.notify.settimeout(DEADLINE_S)

    def next_message(self, wanted):
        while True:
            message = self.notify.recv(4096).decode().splitlines()
            if any(line.startswith(wanted) for line in message):
                return message

    def daemon(self, *args, **environment):
        return Daemon(*args, environment={"NOTIFY_SOCKET": str(self.folder / "notify"), **environment})

    def test_ready_means_that_calls_are_answered(self):
        with self.daemon() as daemon:
            self.assertIn("READY=1", self.notify.recv(4096).decode().splitlines())
            self.assertTrue(daemon.answers())

    def test_stopping_and_reloading_are_told(self):
        with self.daemon() as daemon:
            self.next_message("READY=1")
            daemon.process.send_signal(signal.SIGHUP)
            self.assertTrue(any(line.startswith("MONOTONIC_USEC=") for line in self.next_message("RELOADING=1")))
            self.next_message("READY=1")
            daemon.process.terminate()
            self.next_message("STOPPING=1")

    def test_the_watchdog_is_fed_while_the_core_answers(self):
        # WATCHDOG_PID is the daemon's own pid, which a shell knows before exec.
        script = 'WATCHDOG_PID=$$ exec "$0" "$@"'
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(["/bin/sh", "-c", script, DAEMON, "--config=/dev/null", "--directory", folder],
                                       env={**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), "WATCHDOG_USEC": "200000"},
                                       stderr=subprocess.DEVNULL)
            try:
                for _ in range(3):
                    self.next_message("WATCHDOG=1")
            finally:
                process.terminate()
                self.assertEqual(process.wait(DEADLINE_S), 0)

    def test_runtime_directory_of_the_unit_is_used(self):
        process = subprocess.Popen([DAEMON, "--config=/dev/null"], stderr=subprocess.DEVNULL,
                                   env={**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), "RUNTIME_DIRECTORY": str(self.folder / "run")})
        try:
            self.next_message("READY=1")
            self.assertTrue((self.folder / "run/control.sock").is_socket())
            self.assertTrue((self.folder / "run/handle.sock").is_socket())
        finally:
            process.terminate()
            self.assertEqual(process.wait(DEADLINE_S), 0)


class Reload(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.file = Path(self._folder.name) / "moecached.toml"

    def reload(self, daemon, text, expected):
        self.file.write_text(text)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(expected, lambda: expected in daemon.log.read_text())

    def test_policy_and_level_follow_the_file_and_a_bad_file_changes_nothing(self):
        self.file.write_text("[log]\nlevel = \"info\"\n")
        with Daemon("--config", str(self.file)) as daemon:
            self.reload(daemon, "[policy]\ndefault = \"lru\"\n[ssd]\nqueue_depth = 7\n", "configuration reloaded")
            self.assertEqual(daemon.ctl("policy", "get")["policies"][0]["spec"], "lru")
            self.assertIn("ssd.queue_depth stays 32 until a restart", daemon.log.read_text())
            self.reload(daemon, "[policy]\ndefault = \"best\"\n", "configuration not reloaded")
            self.assertEqual(daemon.ctl("policy", "get")["policies"][0]["spec"], "lru")
            self.assertTrue(daemon.answers())


class Log(unittest.TestCase):
    def test_json_lines_carry_the_fields(self):
        with Daemon("--log-format", "json") as daemon:
            subprocess.run([CTL, "--socket", daemon.directory / "control.sock", "status"], check=True, capture_output=True)
            daemon.process.terminate()
            daemon.process.wait(DEADLINE_S)
            lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        ready = next(line for line in lines if line["message"] == "ready")
        self.assertEqual(ready["control"], str(daemon.directory / "control.sock"))
        self.assertEqual(ready["level"], "info")
        self.assertIsInstance(ready["pool_bytes"], int)
        self.assertEqual(lines[-1]["message"], "stopped")


if __name__ == "__main__":
    unittest.main()
