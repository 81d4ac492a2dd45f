"""What one user may take, what a client may say and hear, and where models may lie: a running daemon under clients that ask for more."""
import contextlib
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import harness
import raw_client
from harness import Daemon, wait_for
from raw_client import Closed, RawClient, Refused

LIMIT = 3  # MOECACHED_ERROR_LIMIT
NOBODY = 65534


class ClientLimits(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moecached-limits-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def copy(self, name):
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(harness.Q4_K, path)
        return path

    def test_client_that_says_nothing_is_cut_and_others_are_served(self):
        with Daemon("--slots", "8", "--limits-hello-seconds", "1") as daemon:
            with RawClient(daemon.socket) as greeted, RawClient(daemon.socket, hello=False) as silent:
                with self.assertRaises(Closed):
                    silent.receive()
                # Who has said hello may be silent for as long as it likes.
                self.assertEqual([session["id"] for session in daemon.sessions()], [greeted.session_id])
                greeted.open_model(harness.Q4_K)
            self.assertIn("client cut, no hello within 1 s", daemon.log.read_text())

    def test_client_whose_hello_was_not_read_in_time_is_not_cut(self):
        with Daemon("--slots", "8", "--limits-hello-seconds", "1") as daemon:
            clients = [RawClient(daemon.socket, hello=False) for _ in range(3)]
            with RawClient(daemon.socket):  # the others are accepted as well, they came before
                with daemon.held():
                    for client in clients:
                        client.send_hello()
                    end = time.monotonic() + 1.2
                    wait_for("their time to be over", lambda: time.monotonic() > end)
                for client in clients:
                    client.receive_welcome()
            for client in clients:
                client.close()

    def test_programs_that_start_together_lose_no_connection(self):
        with Daemon("--slots", "8", "--limits-hello-seconds", "60") as daemon:
            clients = []
            for n in (24, 40):  # that said nothing yet, as many as are accepted; that all spoke while the daemon was busy
                with daemon.held() if n > 32 else contextlib.nullcontext():
                    clients = [RawClient(daemon.socket, hello=False) for _ in range(n)]
                    for client in clients:
                        client.send_hello()
                for client in clients:
                    client.receive_welcome()
                for client in clients:
                    client.close()
                wait_for("the sessions to end", lambda: not daemon.sessions())

    def test_silent_clients_are_few_and_keep_nobody_out(self):
        with Daemon("--slots", "8", "--limits-hello-seconds", "60") as daemon:
            silent = [RawClient(daemon.socket, hello=False) for _ in range(32)]
            with RawClient(daemon.socket, hello=False) as one_more:
                with self.assertRaises(Closed):
                    silent[0].receive()  # the first one made room
                one_more.connect()
            self.assertIn("client cut, others came and it said no hello", daemon.log.read_text())
            for client in silent[1:]:
                client.connect()
            for client in silent:
                client.close()

    def test_sessions_of_one_user(self):
        with Daemon("--slots", "8", "--limits-user-sessions", "1") as daemon:
            with RawClient(daemon.socket):
                with RawClient(daemon.socket, hello=False) as second, self.assertRaises(Refused) as refused:
                    second.connect()
                self.assertEqual(refused.exception.code, LIMIT)
                self.assertIn(f"user {os.geteuid()} would have 2 sessions, limits.user_sessions = 1", refused.exception.text)
            wait_for("its session to end", lambda: not daemon.sessions())
            RawClient(daemon.socket).close()

    def test_descriptors_of_one_user(self):
        # A session is 4, an open model 2: its shard and its stream. One that is open already costs no shard more.
        with Daemon("--slots", "8", "--limits-user-files", "12") as daemon, RawClient(daemon.socket) as client:
            first = client.open_model(self.copy("a"))
            client.open_model(self.copy("b"))
            with RawClient(daemon.socket) as second, self.assertRaises(Refused) as refused:
                second.open_model(self.copy("c"))
            self.assertIn("14 descriptors, limits.user_files = 12", refused.exception.text)
            wait_for("the second session to end", lambda: len(daemon.sessions()) == 1)
            client.open_model(self.directory / "c")
            self.assertEqual(len(daemon.models()), 3)
            self.assertEqual(client.open_model(self.directory / "a"), first)

    def test_memory_of_one_user(self):
        with Daemon("--slots", "8", "--limits-user-bytes", "64KiB") as daemon, RawClient(daemon.socket) as client:
            with self.assertRaises(Refused) as refused:
                client.open_model(harness.Q4_K)
            self.assertIn("limits.user_bytes", refused.exception.text)
            self.assertEqual(daemon.models(), [])
        with Daemon("--slots", "auto", "--pool-bytes", "1GiB", "--limits-user-bytes", "4MiB") as daemon:
            with RawClient(daemon.socket) as client:
                client.open_model(harness.Q4_K)  # in fewer slots
                self.assertLessEqual(daemon.models()[0]["pool_bytes"], 4 << 20)
                with self.assertRaises(Refused) as refused:
                    client.open_model(self.copy("another"))
                self.assertIn("limits.user_bytes", refused.exception.text)
            # What nobody uses any more counts for nobody.
            wait_for("the session to end", lambda: not daemon.sessions())
            with RawClient(daemon.socket) as client:
                client.open_model(self.directory / "another")

    def test_models_outside_of_the_roots_are_refused(self):
        inside, outside = self.copy("models/inside.gguf"), self.copy("outside.gguf")
        (self.directory / "models/link.gguf").symlink_to(outside)
        with Daemon("--slots", "8", "--models-roots", str(self.directory / "models")) as daemon:
            with RawClient(daemon.socket) as client:
                for path in (outside, self.directory / "models/link.gguf"):
                    with self.assertRaises(Refused) as refused:
                        client.open_model(path)
                    self.assertIn("models.roots", refused.exception.text)
                    self.assertNotIn(str(self.directory), refused.exception.text)
                    self.assertEqual(daemon.models(), [])
                client.open_model(inside)
            # By name as well, and what is not there is told as what may not be read.
            answers = []
            for path in (outside, self.directory / "absent.gguf"):
                for command in (("prewarm", "--from"), ("register",)):
                    done = subprocess.run([harness.CTL, "--socket", daemon.directory / "control.sock", *command, path],
                                          capture_output=True, text=True)
                    self.assertNotEqual(done.returncode, 0, command)
                    answers.append(done.stderr.replace(str(path), "PATH"))
            self.assertTrue(all("PATH is no readable file beneath models.roots" in answer for answer in answers), answers)
            self.assertEqual(answers[:2], answers[2:])

    def test_label_that_is_no_text_hides_nobody(self):
        with Daemon("--slots", "8") as daemon, RawClient(daemon.socket), RawClient(daemon.socket, hello=False) as odd:
            odd.send(RawClient.message(raw_client.HELLO, struct.pack("<II64s", raw_client.SHM_VERSION, 1, b"\xff\xc3(\n")))
            odd.receive()
            self.assertEqual(sorted(session["label"] for session in daemon.sessions()), ["??(?", "raw-client"])

    @unittest.skipIf(os.geteuid() != 0, "another user's client needs root")
    def test_another_user_is_not_told_what_system_calls_say(self):
        with Daemon("--slots", "8", "--sockets-mode", "0666") as daemon:
            os.chmod(daemon.directory, 0o755)
            # Room for one more descriptor: the connection, and none for its session.
            taken = {int(fd) for fd in os.listdir(f"/proc/{daemon.process.pid}/fd")}
            soft = next(n for n in range(3, 4096) if n - len([fd for fd in taken if fd < n]) == 1)
            hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
            # Python itself may lie where that user cannot read.
            program = ("import os, sys\n"
                       "from raw_client import RawClient, Refused\n"
                       "os.setgid({0}); os.setuid({0})\n"
                       "try: RawClient(sys.argv[1])\n"
                       "except Refused as refused: print(refused.text)").format(NOBODY)
            done = subprocess.run([sys.executable, "-c", program, daemon.socket], capture_output=True, text=True,
                                  cwd=Path(__file__).parent)
            self.assertEqual(done.stdout, "the daemon could not do it; its log says why\n", done.stderr)
            log = daemon.log.read_text()
            self.assertIn(f"session refused uid={NOBODY}", log)
            self.assertIn("Too many open files", log)
            # Root may know.
            with RawClient(daemon.socket, hello=False) as client, self.assertRaises(Refused) as refused:
                client.connect()
            self.assertIn("Too many open files", refused.exception.text)


if __name__ == "__main__":
    harness.main()
