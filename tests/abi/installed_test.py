"""What `cmake --install` puts where, as a stranger uses it: staged with DESTDIR, moved elsewhere, found by pkg-config and by CMake,
built into the example program with the compiler alone, and run against a real daemon.

usage: installed_test.py CMAKE BUILD
"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CMAKE, BUILD = sys.argv[1], Path(sys.argv[2]).resolve()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "integration"))
os.environ["MOECACHED_BUILD"] = str(BUILD)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
import harness  # noqa: E402  finds the programs of MOECACHED_BUILD
import moe_files  # noqa: E402

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(stranger LANGUAGES {languages})
find_package(moecached {version} CONFIG REQUIRED)
add_executable(shared {source})
target_link_libraries(shared PRIVATE moecached::client)
add_executable(static {source})
target_link_libraries(static PRIVATE moecached::client_static)
"""


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    return done.returncode, done.stdout + done.stderr


class InstalledTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="moecached-installed-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        stage = cls.folder / "stage"
        for part in ("client/src", "client/examples", "examples/engine"):
            code, text = run(CMAKE, "--install", BUILD / part, env={**os.environ, "DESTDIR": str(stage)})
            assert code == 0, text
        cache = (BUILD / "CMakeCache.txt").read_text()
        prefix = next(line.split("=", 1)[1] for line in cache.splitlines() if line.startswith("CMAKE_INSTALL_PREFIX:"))
        # Somewhere else than it was installed to: nothing in it may name where that was.
        cls.prefix = cls.folder / "moved"
        (stage / prefix.lstrip("/")).rename(cls.prefix)
        cls.library = next(cls.prefix.rglob("libmoecached_client.so")).parent
        cls.example = next(cls.prefix.rglob("read_expert.c"))
        cls.daemon = harness.Daemon()
        cls.daemon.start()
        cls.addClassCleanup(cls.daemon.__exit__)

    def pkg_config(self, *words):
        code, text = run("pkg-config", *words, "moecached", env={**os.environ, "PKG_CONFIG_PATH": str(self.library / "pkgconfig")})
        self.assertEqual(code, 0, text)
        return text.split()

    def run_example(self, program, model, **environment):
        code, text = run(program, model, env={**os.environ, "MOECACHED_SOCKET": self.daemon.socket, **environment})
        self.assertEqual(code, 0, text)
        return text

    def assert_works(self, program, **environment):
        text = self.run_example(program, harness.Q4_K, **environment)
        self.assertIn("bytes, equal", text)
        self.assertIn("read from the file by this process 0", text)

    def needed(self, program):
        return subprocess.check_output(["readelf", "-d", program], text=True)

    def test_pkg_config_alone_builds_a_c_program(self):
        program = self.folder / "by_pkg_config"
        code, text = run("cc", "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", self.example, "-o", program,
                         *self.pkg_config("--cflags", "--libs"))
        self.assertEqual(code, 0, text)
        self.assertIn("[libmoecached_client.so.1]", self.needed(program), "linked to the name that stays, not to the version")
        self.assert_works(program, LD_LIBRARY_PATH=str(self.library))

    def test_the_engine_example_is_installed_whole(self):
        program, model = self.folder / "moe_layer", self.folder / "model.gguf"
        code, text = run("cc", "-O2", self.example.parent / "moe_layer.c", "-o", program, *self.pkg_config("--cflags", "--libs"), "-lm")
        self.assertEqual(code, 0, text)
        moe_files.write_gguf(model, moe_files.Model())
        self.assertIn("equal: lookups", self.run_example(program, model, LD_LIBRARY_PATH=str(self.library)))

    def test_pkg_config_static_names_all_that_the_archive_needs(self):
        program = self.folder / "by_pkg_config_static"
        words = self.pkg_config("--static", "--cflags", "--libs")
        self.assertIn("-lmoecached_client", words)
        words[words.index("-lmoecached_client")] = str(self.library / "libmoecached_client.a")
        code, text = run("cc", self.example, "-o", program, *words)
        self.assertEqual(code, 0, text)
        self.assertNotIn("libmoecached", self.needed(program))
        self.assert_works(program)

    def configure(self, version, languages="C CXX"):
        folder = self.folder / f"project-{version}-{languages.replace(' ', '-')}"
        folder.mkdir()
        (folder / "CMakeLists.txt").write_text(PROJECT.format(version=version, languages=languages, source=self.example))
        return folder, run(CMAKE, "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}")

    def test_find_package_gives_both_libraries(self):
        for languages in ("C CXX", "C"):  # the archive is C++ inside, which a project in C need not know
            with self.subTest(languages=languages):
                folder, (code, text) = self.configure("0.1", languages)
                self.assertEqual(code, 0, text)
                code, text = run(CMAKE, "--build", folder / "build")
                self.assertEqual(code, 0, text)
                self.assertIn("[libmoecached_client.so.1]", self.needed(folder / "build/shared"))
                self.assertNotIn("libmoecached", self.needed(folder / "build/static"))
                self.assert_works(folder / "build/shared")
                self.assert_works(folder / "build/static")

    def test_find_package_refuses_another_version(self):
        _, (code, text) = self.configure("7.0")
        self.assertNotEqual(code, 0)
        self.assertIn("7.0", text)

    def test_nothing_installed_names_the_build_or_the_prefix(self):
        for file in self.prefix.rglob("*"):
            if file.suffix in (".cmake", ".pc", ".h"):
                text = file.read_text()
                self.assertNotIn(str(BUILD), text, file)
                self.assertNotIn("/usr/local", text, file)


unittest.main(verbosity=2, argv=sys.argv[:1])
