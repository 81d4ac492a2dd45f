"""A client in Python that speaks the handle socket and writes its ring by hand: well enough to be served, freely enough to lie.

It does not use libmoecached_client, which would not let it send what these tests send. Offsets are those of proto/shm/layout.h;
the assertions at the end of connect() catch a layout that has moved on.
"""
import array
import ctypes
import mmap
import os
import socket
import struct

HANDLE_MAGIC, HANDLE_VERSION, SHM_VERSION = 0x4843454D, 1, 7
HELLO, WELCOME, MODEL_OPEN, MODEL_OPENED, ERROR = 1, 2, 3, 4, 5
ROUTE, LEASE, STREAM = 1, 2, 3
MORE = 1
OK, IO_ERROR, MODEL_CHANGED, REFUSED = 0, 1, 2, 3
ALL_LAYERS = 0xFFFF
RING_RECORDS, RECORD_IDS, RECORD_BYTES, LANE_RING = 2048, 20, 64, 128
SHM_MAGIC = 0x3148434143454F4D


class Refused(Exception):
    """The daemon's own words."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code, self.text = code, text


class Closed(Exception):
    """The daemon closed the connection without a word."""


class Lane:
    """The words of one lane. Aligned native stores, so that the daemon never sees half a word."""

    _OFFSETS = {"begun": 0, "completed": 8, "head": 24, "dropped": 32, "lookups": 56, "tail": 64}
    _OFFSETS_32 = {"state": 16, "model_id": 20, "lease_done": 72, "lease_status": 76}

    def __init__(self, segment, at, doorbell):
        self._at, self._segment, self._doorbell = at, segment, doorbell
        self._words = {name: ctypes.c_uint64.from_buffer(segment, at + offset) for name, offset in self._OFFSETS.items()}
        self._words |= {name: ctypes.c_uint32.from_buffer(segment, at + offset) for name, offset in self._OFFSETS_32.items()}
        for half in (0, 1):
            self._words[f"stream_done{half}"] = ctypes.c_uint32.from_buffer(segment, at + 80 + 4 * half)
            self._words[f"stream_status{half}"] = ctypes.c_uint32.from_buffer(segment, at + 88 + 4 * half)

    def get(self, name):
        return self._words[name].value

    def set(self, **values):
        for name, value in values.items():
            self._words[name].value = value

    def open(self, model_id):
        self.set(model_id=model_id, state=1)

    def write(self, position, kind, ids, *, layer=0, flags=0, seq=0, part=0, half=0, epoch=0, n_ids=None):
        ids = list(ids)
        packed = struct.pack("<HHHHIHHQ20H", kind, flags, layer, len(ids) if n_ids is None else n_ids, seq, part, half, epoch,
                             *ids, *[0] * (RECORD_IDS - len(ids)))
        at = self._at + LANE_RING + position % RING_RECORDS * RECORD_BYTES
        self._segment[at:at + RECORD_BYTES] = packed

    def post(self, kind, ids, **fields):
        head = self.get("head")
        self.write(head, kind, ids, **fields)
        self.set(head=head + 1)
        self.ring()

    def ring(self):
        os.eventfd_write(self._doorbell, 1)

    def drained(self):
        return self.get("tail") == self.get("head")

    def release(self):
        self._words.clear()


class RawClient:
    """Use as a context manager; leaves the lanes as they are at the end, as a program that dies does."""

    def __init__(self, path, hello=True):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.segment, self.fds, self.lanes = None, [], []
        if hello:
            self.connect()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def close(self):
        self.socket.close()
        for lane in self.lanes:
            lane.release()
        if self.segment is not None:
            self.segment.close()
        for fd in self.fds:
            os.close(fd)
        self.segment, self.fds, self.lanes = None, [], []

    @staticmethod
    def message(kind, body=b"", *, n_fds=0, magic=HANDLE_MAGIC, version=HANDLE_VERSION, size=None):
        return struct.pack("<IHHII", magic, version, kind, 16 + len(body) if size is None else size, n_fds) + body

    def send(self, message, fds=()):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([message], ancillary)

    def receive(self):
        """Returns (type, body, fds) or raises what the daemon says."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 4096, 16)
        except ConnectionResetError:
            raise Closed from None
        if not data:
            raise Closed
        magic, _, kind, size, n_fds = struct.unpack_from("<IHHII", data)
        assert magic == HANDLE_MAGIC and size == len(data) and n_fds == len(fds), "a malformed reply of the daemon"
        if kind == ERROR:
            code, = struct.unpack_from("<I", data, 16)
            raise Refused(code, data[20:].split(b"\0")[0].decode())
        self.fds += fds
        return kind, data[16:], fds

    def connect(self, **header):
        self.send_hello(**header)
        self.receive_welcome()

    def send_hello(self, **header):
        shm_version = header.pop("shm_version", SHM_VERSION)
        self.send(self.message(HELLO, struct.pack("<II64s", shm_version, os.getpid(), b"raw-client"), **header))

    def receive_welcome(self):
        kind, body, fds = self.receive()
        assert kind == WELCOME and len(fds) == 2, (kind, fds)
        _, self.session_id, size = struct.unpack("<QQQ", body)
        self.segment = mmap.mmap(fds[0], size)
        magic, version = struct.unpack_from("<QI", self.segment)
        assert (magic, version) == (SHM_MAGIC, SHM_VERSION), "the layout has another version: this client must follow"
        _, n_lanes, ring, offset, stride = struct.unpack_from("<QIIQQ", self.segment, 64)
        assert ring == RING_RECORDS and stride == LANE_RING + ring * RECORD_BYTES, "the lanes have another layout"
        self.lanes = [Lane(self.segment, offset + i * stride, fds[1]) for i in range(n_lanes)]

    def open_model(self, *paths):
        """Returns the model's id."""
        files = [os.open(path, os.O_RDONLY) for path in paths]
        try:
            return self.open_model_fds(files, os.path.basename(str(paths[0])))
        finally:
            for fd in files:
                os.close(fd)

    def open_model_fds(self, fds, name="model"):
        self.send(self.message(MODEL_OPEN, struct.pack("<256s", name.encode()), n_fds=len(fds)), fds)
        kind, body, _ = self.receive()
        assert kind == MODEL_OPENED, kind
        return struct.unpack_from("<I", body)[0]
