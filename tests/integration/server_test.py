"""Unmodified llama.cpp programs and node-llama-cpp through moecached give what they give without it.

MOECACHED_LLAMA_BIN is the bin folder of a CMake build of llama.cpp, MOECACHED_NODE_MODULES a node_modules folder with
node-llama-cpp in it; without them the cases are skipped and say so.
"""
import concurrent.futures
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import harness
from harness import CTL, Daemon, wait_for

BIN = os.environ.get("MOECACHED_LLAMA_BIN", "")
NODE_MODULES = os.environ.get("MOECACHED_NODE_MODULES", "")
PROMPTS = (harness.PROMPT, "int main(int argc, char **argv)", "CREATE TABLE t1 (id INTEGER", "The system call returns a file")
N_PREDICT = 32
NODE_SCRIPT = """
import {getLlama, LlamaCompletion} from "node-llama-cpp";
const llama = await getLlama({gpu: false, build: "never"});
const model = await llama.loadModel({modelPath: process.argv[2]});
const context = await model.createContext({contextSize: 512, threads: 1});
const completion = new LlamaCompletion({contextSequence: context.getSequence()});
const text = await completion.generateCompletion(process.argv[3], {maxTokens: 24, temperature: 0});
console.log("TEXT:" + JSON.stringify(text));
await context.dispose();
await model.dispose();
await llama.dispose();
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def request(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(message, timeout=300) as reply:
        return json.load(reply)


class Server:
    """llama-server, under `moecachectl run` if a prefix is given."""

    def __init__(self, directory, prefix=(), environment=None):
        self.port, self.log = free_port(), directory / f"server-{len(prefix)}.log"
        command = [*prefix, Path(BIN) / "llama-server", "-m", harness.Q4_K, "--host", "127.0.0.1", "--port", str(self.port), "-np", "4",
                   "-c", "2048", "-t", "1", "--no-repack", "--no-webui"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(environment or {})})
        wait_for("llama-server", lambda: self.process.poll() is not None or self.healthy(), 180)
        if self.process.poll() is not None:
            raise AssertionError(f"llama-server ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")

    def healthy(self):
        try:
            return request(self.port, "/health")["status"] == "ok"
        except (urllib.error.URLError, ConnectionError):
            return False

    def complete(self, prompt):
        reply = request(self.port, "/completion", {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "cache_prompt": False,
                                                   "ignore_eos": True, "return_tokens": True})
        return reply["tokens"], reply["content"]

    def stop(self):
        """Asks for a clean end; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class ProgramTestCase(harness.HostTestCase):
    def setUp(self):
        if not (Path(BIN) / "llama-server").exists() or not BIN:
            self.skipTest("no llama.cpp programs (MOECACHED_LLAMA_BIN)")
        directory = tempfile.TemporaryDirectory(prefix="moecached-server-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.stats_path = self.directory / "stats"
        self.environment = {"MOECACHED_STATS_FILE": str(self.stats_path)}
        self.run_prefix = (CTL, "run", "--private", "--slots", "25%", "--plugin", harness.PLUGIN, "--")

    def assert_served_by_daemon(self):
        lines = [json.loads(line) for line in self.stats_path.read_text().splitlines()]
        self.assertTrue(lines, "the plugin wrote no counters: it was not in use")
        self.assertGreater(lines[-1]["lookups"], 0)
        self.assertEqual(lines[-1]["fallback_reads"], 0, "a fallback read served the run, not the daemon")

    def assert_private_daemon_gone(self, text):
        control = Path(re.search(r"moecachectl --socket (\S+) stats", text).group(1))
        self.assertFalse(control.parent.exists(), f"{control.parent} was left behind")
        return control

    def program(self, name, *args, prefix=()):
        return subprocess.run([*prefix, Path(BIN) / name, *args], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
                              env={**os.environ, **(self.environment if prefix else {})}, timeout=300)


class Programs(ProgramTestCase):
    def test_four_parallel_completions_of_llama_server_equal_those_of_stock(self):
        stock = Server(self.directory)
        self.addCleanup(stock.kill)
        expected = [stock.complete(prompt) for prompt in PROMPTS]
        code = stock.stop()

        server = Server(self.directory, self.run_prefix, self.environment)
        self.addCleanup(server.kill)
        control = re.search(r"moecachectl --socket (\S+) stats", server.log.read_text()).group(1)
        status = json.loads(subprocess.run([CTL, "--socket", control, "-o", "json", "status"], capture_output=True, check=True).stdout)
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as threads:
            got = list(threads.map(server.complete, PROMPTS))
        self.assertEqual(server.stop(), code)
        self.assertEqual([len(tokens) for tokens, _ in got], [N_PREDICT] * len(PROMPTS))
        self.assertEqual(got, expected)
        self.assert_served_by_daemon()
        self.assert_private_daemon_gone(server.log.read_text())
        self.assertFalse(Path(f"/proc/{status['pid']}").exists(), "the private daemon lives on")

    def test_llama_perplexity_prints_what_stock_prints(self):
        text = self.directory / "text"
        text.write_text(harness.LONG_PROMPT * 6)
        args = ("-m", harness.Q4_K, "-f", text, "-c", "256", "--chunks", "2", "-t", "1", "--no-repack")
        results = []
        for prefix in ((), self.run_prefix):
            done = self.program("llama-perplexity", *args, prefix=prefix)
            self.assertEqual(done.returncode, 0, done.stderr[-3000:])
            found = re.search(r"Final estimate: PPL = (.*)", done.stdout + done.stderr)
            self.assertIsNotNone(found, done.stdout + done.stderr[-3000:])
            results.append(found.group(1))
        self.assertEqual(results[1], results[0])
        self.assert_served_by_daemon()
        self.assert_private_daemon_gone(done.stderr)

    def test_llama_completion_writes_what_stock_writes(self):
        args = ("-m", harness.Q4_K, "-p", harness.PROMPT, "-n", str(N_PREDICT), "-t", "1", "--temp", "0", "--no-repack", "-no-cnv", "--ignore-eos")
        stock = self.program("llama-completion", *args)
        run = self.program("llama-completion", *args, prefix=self.run_prefix)
        self.assertEqual((stock.returncode, run.returncode), (0, 0), run.stderr[-3000:])
        self.assertIn(harness.PROMPT, stock.stdout)
        self.assertEqual(run.stdout, stock.stdout)
        self.assert_served_by_daemon()

    def test_exit_code_of_run_is_that_of_the_program(self):
        for code in (0, 37):
            done = subprocess.run([*self.run_prefix, "sh", "-c", f"exit {code}"], capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assert_private_daemon_gone(done.stderr)
        args = ("-m", self.directory / "no-such-model.gguf", "-p", "x", "-n", "1")
        stock = self.program("llama-completion", *args)
        self.assertNotEqual(stock.returncode, 0)
        self.assertEqual(self.program("llama-completion", *args, prefix=self.run_prefix).returncode, stock.returncode)


class Node(ProgramTestCase):
    def setUp(self):
        if not (Path(NODE_MODULES) / "node-llama-cpp").exists() or not NODE_MODULES:
            self.skipTest("no node-llama-cpp (MOECACHED_NODE_MODULES)")
        node = shutil.which("node")
        version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout if node else "v0"
        if int(version.strip().lstrip("v").split(".")[0]) < 20:
            self.skipTest(f"node-llama-cpp needs Node 20; found {version.strip() if node else 'none'}")
        directory = tempfile.TemporaryDirectory(prefix="moecached-node-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.stats_path = self.directory / "stats"

    def test_node_llama_cpp_is_served_without_a_fallback_read(self):
        script = self.directory / "generate.mjs"
        script.write_text(NODE_SCRIPT)
        (self.directory / "node_modules").symlink_to(Path(NODE_MODULES).resolve())
        with Daemon("--slots", "8") as daemon:
            done = subprocess.run(["node", script, harness.Q4_K, harness.PROMPT], capture_output=True, text=True, timeout=300,
                                  env={**os.environ, "GGML_BACKEND_PATH": str(harness.PLUGIN), "MOECACHED_SOCKET": daemon.socket,
                                       "MOECACHED_STATS_FILE": str(self.stats_path)})
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            text = json.loads(re.search(r"^TEXT:(.*)$", done.stdout, re.MULTILINE).group(1))
            self.assertGreater(len(text), 10)
            self.assert_served_by_daemon()
            layers = daemon.models()[0]["layers"]
            self.assertGreater(sum(layer["lookups"] for layer in layers), 0)


if __name__ == "__main__":
    harness.main()
