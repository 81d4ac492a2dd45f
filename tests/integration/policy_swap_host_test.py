"""An operator changes the policy again and again while a real llama.cpp decodes: the text stays stock's."""
import shutil
import subprocess
import tempfile

import harness
from harness import BUILD, CTL, Daemon, Host, stock

SPECS = ("lru", "SLRU:admit=second-miss", "arc", "lfu:halve=64", "ewma:decay=900,admit=value", "s3fifo", "sieve", "learned", "wtinylfu",
         "lib:lru2:period=2")


class PolicySwap(harness.HostTestCase):
    def test_text_under_policy_set_is_that_of_stock(self):
        n_predict = 400
        reference = stock(harness.Q4_K, n_predict=n_predict)
        with tempfile.TemporaryDirectory(prefix="moecached-policies-") as policies, \
                Daemon("--slots", "8", "--policy-directory", policies) as daemon:
            shutil.copyfile(BUILD / "examples/policy/lru2.so", f"{policies}/lru2.so")
            host = Host(harness.Q4_K, daemon=daemon, n_predict=n_predict)
            harness.wait_for("the model", lambda: host.process.poll() is not None or daemon.models())
            model = str(daemon.models()[0]["id"])
            swaps = lookups = moved = 0
            while host.process.poll() is None:
                spec = SPECS[swaps % len(SPECS)]
                where = ("ram", spec) if swaps % 2 else (spec, "--model", model)
                self.assertEqual(daemon.ctl("policy", "set", *where)["spec"], spec.replace("SLRU", "slru"))
                swaps += 1
                now = sum(layer["lookups"] for layer in daemon.models()[0]["layers"])
                moved += now > lookups
                lookups = now
            run = host.finish()
            self.assert_served(run)
            self.assert_same(run, reference)
            self.assertGreater(moved, 3, f"{swaps} changes, hardly any of them while it decoded: the test shows nothing")
            print(f"{swaps} changes, {moved} of them while it decoded", flush=True)

    def test_bad_policy_is_refused_with_its_reason(self):
        with Daemon("--slots", "8") as daemon:
            for words, reason in ((("gpux", "lru"), "say ram or gpu"), (("ram", "best"), "no policy 'best'"),
                                  (("lru:size=3",), "it has admit"), (("lru", "--model", "7"), "no model 7")):
                done = subprocess.run([CTL, "--socket", daemon.directory / "control.sock", "policy", "set", *words],
                                      capture_output=True, text=True)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(reason, done.stderr)
            self.assertEqual(daemon.ctl("policy", "get")["policies"][0]["spec"], "slru")


if __name__ == "__main__":
    harness.main()
