"""Bad input gets an error for that one, and nothing else is disturbed: bad files, lying and stalled clients, missing resources.

Every case ends with a good client, on the same daemon, that must equal stock with no fallback read.
"""
import os
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
from pathlib import Path

import harness
from harness import Daemon, Host, stock, wait_for
import raw_client
from raw_client import LEASE, MORE, REFUSED, ROUTE, STREAM, Closed, RawClient, Refused

LAYERS, EXPERTS, TOP_K = 8, 32, 4
GATE = b"blk.0.ffn_gate_exps.weight"
NOBODY = 65534
HOST_NO_MODEL, HOST_DECODE_FAILED, HOST_NO_PLUGIN = 4, 5, 6


class LimitedDaemon(Daemon):
    """A daemon whose process is limited before it starts; as another user if `uid` is given."""

    def __init__(self, *args, limits=(), uid=None):
        super().__init__(*args)
        self.limits, self.uid = limits, uid

    def start(self):
        program = harness.DAEMON
        if self.uid is not None:
            # That user may not be able to reach the build tree.
            program = shutil.copy(harness.DAEMON, self.directory / "moecached")
            os.chown(self.directory, self.uid, self.uid)

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as under systemd: the call fails, the process lives
            for which, soft in self.limits:
                resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))
            if self.uid is not None:
                os.setgroups([])
                os.setgid(self.uid)
                os.setuid(self.uid)

        with self.log.open("a") as log:
            self.process = subprocess.Popen([program, "--directory", str(self.directory), *self.args],
                                            stdout=subprocess.DEVNULL, stderr=log, preexec_fn=limit)
        wait_for("the daemon to listen", lambda: self.process.poll() is not None or self.answers())
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}: {self.log.read_text()}"


class BadInputTestCase(harness.HostTestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moecached-bad-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def assert_good_client(self, daemon, n_predict=32):
        run = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=n_predict).finish()
        self.assert_served(run)
        self.assert_same(run, stock(harness.Q4_K, n_predict=n_predict))

    def assert_alive(self, daemon):
        self.assertIsNone(daemon.process.poll(), daemon.log.read_text()[-2000:])

    def session(self, daemon, session_id):
        return next(session for session in daemon.sessions() if session["id"] == session_id)


def patched(data, at, new):
    return data[:at] + new + data[at + len(new):]


def broken_models():
    """(what is wrong, bytes of the file). Offsets are found by name, so that another model file would do too."""
    good = harness.Q4_K.read_bytes()
    gate = good.index(GATE) + len(GATE)
    dims, kind, offset = gate + 4, gate + 4 + 24, gate + 4 + 24 + 4
    n_experts = good.index(b"qwen3moe.expert_count") + len(b"qwen3moe.expert_count") + 4
    n_used = good.index(b"qwen3moe.expert_used_count") + len(b"qwen3moe.expert_used_count") + 4
    u32, u64 = (lambda value: struct.pack("<I", value)), (lambda value: struct.pack("<Q", value))
    return [
        ("empty", b""),
        ("not a GGUF", b"GGML" + good[4:]),
        ("version 99", patched(good, 4, u32(99))),
        ("cut in the metadata", good[:1000]),
        ("cut in the tensor list", good[:gate + 10]),
        ("cut in the tensor data", good[:len(good) // 2]),
        ("last byte missing", good[:-1]),
        ("too many tensors", patched(good, 8, u64(1 << 62))),
        ("too many keys", patched(good, 16, u64((1 << 64) - 1))),
        ("a key longer than the file", patched(good, 24, u64(1 << 40))),
        ("a tensor behind the end", patched(good, offset, u64(1 << 40))),
        ("a tensor whose end overflows", patched(good, offset, u64((1 << 64) - 32))),
        ("a tensor that is not aligned", patched(good, offset, u64(struct.unpack_from("<Q", good, offset)[0] + 1))),
        ("a dimension that overflows", patched(good, dims + 16, u64(1 << 62))),
        ("no rows", patched(good, dims + 8, u64(0))),
        ("five dimensions", patched(good, gate, u32(5))),
        ("an unknown type", patched(good, kind, u32(200))),
        ("an expert count that is not the tensors'", patched(good, n_experts, u32(EXPERTS * 2))),
        ("more experts used than there are", patched(good, n_used, u32(EXPERTS + 1))),
        ("no expert used", patched(good, n_used, u32(0))),
    ]


class BadModels(BadInputTestCase):
    def test_broken_file_is_refused_with_a_sentence_and_the_session_goes_on(self):
        with Daemon("--slots", "8") as daemon, RawClient(daemon.socket) as client:
            for what, data in broken_models():
                with self.subTest(what=what):
                    path = self.directory / "broken.gguf"
                    path.write_bytes(data)
                    with self.assertRaises(Refused) as refused:
                        client.open_model(path)
                    self.assertGreater(len(refused.exception.text), 10)
                    self.assertEqual(daemon.models(), [])
            model = client.open_model(harness.Q4_K)
            self.assertEqual([entry["id"] for entry in daemon.models()], [model])
            self.assert_good_client(daemon)

    def test_things_that_are_no_files_are_refused(self):
        reader, writer = os.pipe()
        folder = os.open(self.directory, os.O_RDONLY)
        null = os.open("/dev/null", os.O_RDONLY)
        write_only = os.open(self.directory / "w", os.O_WRONLY | os.O_CREAT)
        try:
            with Daemon("--slots", "8") as daemon, RawClient(daemon.socket) as client:
                for fd in (reader, folder, null, write_only):
                    with self.assertRaises(Refused):
                        client.open_model_fds([fd])
                self.assertEqual(daemon.models(), [])
                self.assert_good_client(daemon)
        finally:
            for fd in (reader, writer, folder, null, write_only):
                os.close(fd)

    def test_host_with_a_truncated_file_fails_as_stock_does_while_another_decodes(self):
        path = self.directory / "truncated.gguf"
        path.write_bytes(harness.Q4_K.read_bytes()[:20_000_000])
        with Daemon("--slots", "8") as daemon:
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200)
            wait_for("decoding", lambda: daemon.lookups() > 1000)
            bad = Host(path, daemon=daemon, threads=1).finish(expect=None)
            self.assertEqual(bad.process.returncode, HOST_NO_MODEL, bad.stderr)
            good.finish()
            self.assert_served(good)
            self.assert_same(good, stock(harness.Q4_K, n_predict=200))

    def change_while_in_use(self, change):
        path = self.directory / "in-use.gguf"
        shutil.copy(harness.Q4_K, path)
        os.utime(path, (1_000_000_000, 1_000_000_000))
        n = 600
        with Daemon("--slots", "4") as daemon:
            victim = Host(path, daemon=daemon, threads=1, n_predict=n)
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200)
            wait_for("both to decode", lambda: len(daemon.sessions()) == 2 and
                     all(session["lookups"] > 1000 for session in daemon.sessions()))
            change(path)
            victim.finish(expect=None)
            self.assertEqual(victim.process.returncode, HOST_DECODE_FAILED, victim.stderr)
            self.assertIn("has changed", victim.stderr)
            self.assertIn(str(path), victim.stderr)
            text = stock(harness.Q4_K, n_predict=n).text.rstrip(b"\n")
            self.assertTrue(text.startswith(victim.text.rstrip(b"\n")), "other text came out before the error")
            good.finish()
            self.assert_served(good)
            self.assert_same(good, stock(harness.Q4_K, n_predict=200))
            changed = {model["name"]: model["changed_on_disk"] for model in daemon.models()}
            self.assertEqual(changed, {path.name: True, harness.Q4_K.name: False})
            self.assertTrue(any(finding["severity"] == "error" and path.name in finding["subject"]
                                for finding in daemon.ctl("doctor")["findings"]))
            # The new content is another model, not the old one once more.
            with RawClient(daemon.socket) as client:
                old = next(model["id"] for model in daemon.models() if model["name"] == path.name)
                self.assertNotEqual(client.open_model(path), old)
            self.assert_good_client(daemon)

    def test_model_appended_to_while_in_use_stops_its_host_alone(self):
        def append(path):
            with path.open("ab") as file:
                file.write(b"\0" * 4096)

        self.change_while_in_use(append)

    def test_model_overwritten_while_in_use_stops_its_host_alone(self):
        def overwrite(path):
            data = harness.Q4_K.read_bytes()
            at = data.index(GATE) + len(GATE) + 32
            offset, = struct.unpack_from("<Q", data, at)
            with path.open("r+b") as file:
                # Experts alone: what stock maps of the file is not this test's business.
                file.seek(300_000 + offset)
                file.write(b"\x5a" * 500_000)

        self.change_while_in_use(overwrite)


class BadMessages(BadInputTestCase):
    def assert_refused(self, daemon, message, *says, fds=()):
        with RawClient(daemon.socket, hello=False) as client:
            client.send(message, fds)
            with self.assertRaises(Refused) as refused:
                client.receive()
            for text in says:
                self.assertIn(text, refused.exception.text)
            with self.assertRaises(Closed):
                client.receive()

    def test_unknown_versions_are_told_both_numbers(self):
        with Daemon("--slots", "8") as daemon:
            hello = struct.pack("<II64s", raw_client.SHM_VERSION, 1, b"x")
            self.assert_refused(daemon, RawClient.message(raw_client.HELLO, hello, version=99), "99",
                                f"speaks {raw_client.HANDLE_VERSION}")
            future = struct.pack("<II64s", 99, 1, b"x")
            self.assert_refused(daemon, RawClient.message(raw_client.HELLO, future), "99", f"uses {raw_client.SHM_VERSION}")
            self.assert_good_client(daemon)

    def test_garbage_is_refused_and_cut(self):
        hello = struct.pack("<II64s", raw_client.SHM_VERSION, 1, b"x")
        message = RawClient.message
        with Daemon("--slots", "8") as daemon:
            self.assert_refused(daemon, b"x")
            self.assert_refused(daemon, os.urandom(16)[:12] + b"GARB")
            self.assert_refused(daemon, b"GET / HTTP/1.1\r\n\r\n")
            self.assert_refused(daemon, message(raw_client.HELLO, hello, size=4096))
            self.assert_refused(daemon, message(raw_client.HELLO, hello, n_fds=3))
            self.assert_refused(daemon, message(raw_client.HELLO, hello + b"more"))
            self.assert_refused(daemon, message(77), "77")
            self.assert_refused(daemon, message(raw_client.WELCOME))
            self.assert_refused(daemon, message(raw_client.MODEL_OPEN, b"\0" * 256), "hello")
            with RawClient(daemon.socket, hello=False) as client:  # longer than any message
                client.send(b"\xff" * 100_000)
                with self.assertRaises((Closed, Refused)):
                    client.receive()
            with RawClient(daemon.socket) as client:  # hello twice
                client.send(message(raw_client.HELLO, hello))
                with self.assertRaises(Refused):
                    client.receive()
            with RawClient(daemon.socket) as client:  # a model of no file
                with self.assertRaises(Refused):
                    client.open_model_fds([])
            wait_for("the cut sessions to be gone", lambda: not daemon.sessions())
            self.assert_good_client(daemon)


class LyingClients(BadInputTestCase):
    def test_bad_records_are_refused_counted_and_answered(self):
        with Daemon("--slots", "8") as daemon, RawClient(daemon.socket) as client:
            model = client.open_model(harness.Q4_K)
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200)
            wait_for("the good client to decode", lambda: daemon.lookups() > 500)
            lane = client.lanes[0]
            lane.open(model)
            refused = 0

            def lie(kind, ids, **fields):
                nonlocal refused
                lane.post(kind, ids, **fields)
                refused += 1
                wait_for("the record to be taken", lambda: lane.drained() or daemon.process.poll() is not None)

            def assert_all_refused():
                self.assert_alive(daemon)
                self.assertEqual(self.session(daemon, client.session_id)["records_refused"], refused)

            for kind in (0, 4, 77, 0xFFFF):
                lie(kind, [1, 2, 3, 4])
            lie(ROUTE, [EXPERTS])
            lie(ROUTE, [0xFFFF] * 20)
            lie(ROUTE, [1, 1])
            lie(ROUTE, [], n_ids=0)
            lie(ROUTE, [1], n_ids=21)
            lie(ROUTE, [1], n_ids=0xFFFF)
            lie(ROUTE, [1], layer=LAYERS)
            lie(ROUTE, [1], layer=0xFFFF)
            lie(ROUTE, [1], flags=MORE)  # a chain is published whole
            assert_all_refused()
            for seq, (ids, fields) in enumerate([([EXPERTS], {}), ([1, 0xFFFF], {}), ([3, 3], {}), ([1], {"layer": LAYERS}),
                                                 ([1], {"n_ids": 0}), ([1], {"flags": MORE})], start=1000):
                lie(LEASE, ids, seq=seq, epoch=2, **fields)
                wait_for("the answer", lambda: lane.get("lease_done") == seq)
                self.assertEqual(lane.get("lease_status"), REFUSED)
            for seq, (ids, fields) in enumerate([([EXPERTS], {}), ([1], {"part": 3}), ([1], {"layer": 999})], start=2000):
                lie(STREAM, ids, seq=seq, half=1, **fields)
                wait_for("the answer", lambda: lane.get("stream_done1") == seq)
                self.assertEqual(lane.get("stream_status1"), REFUSED)
            lie(STREAM, [1], seq=3000, half=9)
            assert_all_refused()

            # More experts than slots: a valid record that cannot be granted.
            lane.post(LEASE, range(9), seq=4000, epoch=2)
            wait_for("the answer", lambda: lane.get("lease_done") == 4000)
            self.assertEqual(lane.get("lease_status"), REFUSED)

            # A good record behind all of these is served: the lane was not lost.
            lane.post(LEASE, [1, 2, 3, 4], seq=5000, epoch=2)
            wait_for("the grant", lambda: lane.get("lease_done") == 5000)
            self.assertEqual(lane.get("lease_status"), raw_client.OK)
            lane.set(completed=2)

            good.finish()
            self.assert_served(good)
            self.assert_same(good, stock(harness.Q4_K, n_predict=200))
            self.assertTrue(any("refused" in finding["text"] for finding in daemon.ctl("doctor")["findings"]))
            self.assert_good_client(daemon)

    def test_head_that_runs_ahead_or_back_is_given_up(self):
        with Daemon("--slots", "8") as daemon, RawClient(daemon.socket) as client:
            model = client.open_model(harness.Q4_K)
            lane = client.lanes[3]
            lane.open(model)
            for refused, head in enumerate((raw_client.RING_RECORDS + 1, 1 << 63, 5, (1 << 64) - 1), start=1):
                lane.set(head=head)
                lane.ring()
                wait_for("the head to be given up", lane.drained)
                self.assertEqual(self.session(daemon, client.session_id)["records_refused"], refused)
            lane.post(LEASE, [1, 2, 3, 4], seq=1, epoch=2)
            wait_for("the grant", lambda: lane.get("lease_done") == 1)
            self.assertEqual(lane.get("lease_status"), raw_client.OK)
            lane.set(completed=2)
            self.assert_good_client(daemon)

    def test_endless_chain_and_flood_do_not_hold_up_another_client(self):
        with Daemon("--slots", "8") as daemon, RawClient(daemon.socket) as client:
            model = client.open_model(harness.Q4_K)
            lane = client.lanes[0]
            lane.open(model)
            for position in range(raw_client.RING_RECORDS):
                lane.write(position, ROUTE, [position % EXPERTS], flags=MORE)
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=100)
            chains = 0
            while good.process.poll() is None:  # the whole ring is one chain without an end, again and again
                if lane.drained():
                    lane.set(head=lane.get("head") + raw_client.RING_RECORDS)
                    lane.ring()
                    chains += 1
            good.finish()
            self.assert_served(good)
            self.assert_same(good, stock(harness.Q4_K, n_predict=100))
            self.assertGreater(chains, 1)
            wait_for("the last chain", lane.drained)
            self.assertEqual(self.session(daemon, client.session_id)["records_refused"], chains)

            # A ring full of leases, none waited for: each replaces the one before, the last is answered.
            head = lane.get("head")
            for i in range(raw_client.RING_RECORDS):
                lane.write(head + i, LEASE, [(i + k) % EXPERTS for k in range(TOP_K)], layer=i % LAYERS, seq=i + 1, epoch=9)
            lane.set(head=head + raw_client.RING_RECORDS)
            lane.ring()
            wait_for("the last lease", lambda: lane.get("lease_done") == raw_client.RING_RECORDS)
            lane.set(completed=9)
            self.assert_good_client(daemon)

    def test_lane_of_a_model_that_was_not_opened_is_not_served(self):
        with Daemon("--slots", "8") as daemon, RawClient(daemon.socket) as owner, RawClient(daemon.socket) as client:
            model = owner.open_model(harness.Q4_K)
            client.lanes[0].open(model)
            client.lanes[0].post(LEASE, [1, 2, 3, 4], seq=1, epoch=2)
            owner.lanes[0].open(model)
            owner.lanes[0].post(LEASE, [1, 2, 3, 4], seq=1, epoch=2)
            wait_for("the grant to the owner", lambda: owner.lanes[0].get("lease_done") == 1)
            owner.lanes[0].set(completed=2)
            self.assert_good_client(daemon)
            self.assertEqual(client.lanes[0].get("tail"), 0)
            self.assertEqual(client.lanes[0].get("lease_done"), 0)

    def test_lane_that_claims_an_epoch_without_being_open_holds_up_nobody(self):
        with Daemon("--slots", "8") as daemon:
            with RawClient(daemon.socket) as client:
                client.open_model(harness.Q4_K)
                for lane in client.lanes:
                    lane.set(begun=1 << 16 | raw_client.ALL_LAYERS)
                self.assert_good_client(daemon)
            self.assertTrue(all(layer["evictions"] > 0 for layer in daemon.models()[0]["layers"]), "the test shows nothing")
            wait_for("the liar to be gone", lambda: all(session["id"] != client.session_id for session in daemon.sessions()))
            self.assert_alive(daemon)
            self.assert_good_client(daemon)


class StalledClients(BadInputTestCase):
    def test_epoch_that_never_ends_keeps_its_own_slots_and_no_others(self):
        with Daemon("--slots", "16") as daemon, RawClient(daemon.socket) as client:
            model = client.open_model(harness.Q4_K)
            lane = client.lanes[0]
            lane.open(model)
            lane.post(LEASE, [0, 1, 2, 3], seq=1, epoch=2)
            wait_for("the grant", lambda: lane.get("lease_done") == 1)
            lane.set(begun=2 << 16)  # layer 0, and never completed
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200).finish()
            self.assert_served(good)
            self.assert_same(good, stock(harness.Q4_K, n_predict=200))
            self.assertGreater(daemon.models()[0]["layers"][0]["evictions"], 0, "nothing was evicted: the test shows nothing")
            self.assert_alive(daemon)

    def test_leases_that_are_granted_and_never_used_hold_up_nobody(self):
        with Daemon("--slots", "16") as daemon, RawClient(daemon.socket) as client:
            model = client.open_model(harness.Q4_K)
            for layer, lane in enumerate(client.lanes[:LAYERS]):
                lane.open(model)
                lane.post(LEASE, range(8), layer=layer, seq=1, epoch=1)
                wait_for("the grant", lambda: lane.get("lease_done") == 1)
            # Its prompt needs more than the other 8 slots of a layer at once, and no more than 16.
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200).finish()
            self.assert_served(good)
            self.assertGreater(good.stats["streamed_experts"], 0, "everything fitted: the test shows nothing")
            self.assert_same(good, stock(harness.Q4_K, n_predict=200))
            self.assert_alive(daemon)

    def test_epochs_of_which_no_record_tells_hold_up_nobody(self):
        with Daemon("--slots", "16") as daemon:
            self.assert_good_client(daemon)  # fills the slots
            with RawClient(daemon.socket) as client:
                model = client.open_model(harness.Q4_K)
                for layer, lane in enumerate(client.lanes[:LAYERS]):
                    lane.open(model)
                    lane.set(begun=2 << 16 | layer)  # it may use any slot of the layer
                good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200).finish()
                self.assert_served(good)
                self.assertGreater(good.stats["streamed_experts"], 0, "everything fitted: the test shows nothing")
                self.assert_same(good, stock(harness.Q4_K, n_predict=200))
            self.assert_good_client(daemon)

    def test_host_stopped_in_decode_does_not_stop_the_other(self):
        with Daemon("--slots", "16") as daemon:
            stopped = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=600)
            wait_for("decoding", lambda: daemon.lookups() > 1000)
            stopped.process.send_signal(signal.SIGSTOP)
            wait_for("the host to stop", lambda: Path(f"/proc/{stopped.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
            good = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200).finish()
            self.assert_served(good)
            self.assert_same(good, stock(harness.Q4_K, n_predict=200))
            stopped.process.send_signal(signal.SIGCONT)
            stopped.finish()
            self.assert_served(stopped)
            self.assert_same(stopped, stock(harness.Q4_K, n_predict=600))


class MissingResources(BadInputTestCase):
    def test_one_session_too_many_is_refused_and_the_first_goes_on(self):
        with Daemon("--slots", "8", "--limits-sessions", "1") as daemon:
            first = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200)
            wait_for("decoding", lambda: daemon.lookups() > 500)
            with self.assertRaises(Refused) as refused:
                RawClient(daemon.socket)
            self.assertIn("limits.sessions = 1", refused.exception.text)
            second = Host(harness.Q4_K, daemon=daemon, threads=1).finish(expect=None)
            self.assertEqual(second.process.returncode, HOST_NO_PLUGIN, second.stderr)
            self.assertIn("limits.sessions = 1", second.stderr)
            first.finish()
            self.assert_served(first)
            self.assert_same(first, stock(harness.Q4_K, n_predict=200))
            wait_for("its session to end", lambda: not daemon.sessions())
            self.assert_good_client(daemon)

    def test_pool_that_is_too_small_is_named_and_the_host_keeps_its_experts(self):
        with Daemon("--pool-bytes", "64KiB") as daemon:
            run = Host(harness.Q4_K, daemon=daemon, threads=1).finish()
            self.assertIn("is not served: the daemon refused: the pool has", run.stderr)
            self.assertIn("pool.bytes", run.stderr)
            self.assert_same(run, stock(harness.Q4_K))
            self.assertEqual(daemon.models(), [])
            self.assert_alive(daemon)

    def test_pool_that_holds_one_model_refuses_the_second_alone(self):
        path = self.directory / "second.gguf"
        shutil.copy(harness.Q4_K, path)
        with Daemon("--slots", "16", "--pool-bytes", "20MiB") as daemon:
            first = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200)
            wait_for("decoding", lambda: daemon.lookups() > 500)
            second = Host(path, daemon=daemon, threads=1).finish()
            self.assertIn("pool.bytes", second.stderr)
            self.assert_same(second, stock(harness.Q4_K))
            first.finish()
            self.assert_served(first)
            self.assert_same(first, stock(harness.Q4_K, n_predict=200))

    def test_memlock_too_small_is_said_and_changes_no_byte(self):
        uid = NOBODY if os.geteuid() == 0 else None
        with LimitedDaemon("--slots", "8", limits=[(resource.RLIMIT_MEMLOCK, 64 << 10)], uid=uid) as daemon:
            if daemon.ctl("status")["ssd"]["engine"] != "io_uring":
                self.skipTest("io_uring is refused here: nothing is locked")
            run = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200).finish()
            self.assert_served(run)
            self.assert_same(run, stock(harness.Q4_K, n_predict=200))
            ssd = daemon.ctl("status")["ssd"]
            self.assertFalse(ssd["registered_buffers"])
            self.assertIn("memlock", ssd["fallback_reason"].lower())
            self.assertTrue(any(finding["severity"] == "warning" and "memlock" in finding["text"].lower()
                                for finding in daemon.ctl("doctor")["findings"]))

    def test_no_shared_memory_refuses_that_client_and_the_daemon_lives_on(self):
        for limit, says in ((1 << 20, "session"), (4 << 20, "pool")):
            with self.subTest(limit=limit), LimitedDaemon("--slots", "8", limits=[(resource.RLIMIT_FSIZE, limit)]) as daemon:
                with self.assertRaises(Refused) as refused, RawClient(daemon.socket) as client:
                    client.open_model(harness.Q4_K)
                self.assertIn("shared memory", refused.exception.text)
                self.assertIn(says, refused.exception.text)
                self.assertIn("RLIMIT_FSIZE", refused.exception.text)
                self.assertEqual(daemon.models(), [])
                hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
                self.assert_good_client(daemon)


if __name__ == "__main__":
    harness.main()
