#include "daemon/config/tier_string.h"

#include <gmock/gmock.h>

#include "daemon/config/size.h"
#include "tests/unit/config/config_testing.h"

namespace moecached {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class TierString : public ConfigTest {
 protected:
  Config of(const std::string& tiers) {
    const Result<Config> config = load("", {"--tiers", tiers});
    EXPECT_TRUE(config) << tiers << ": " << (config ? "" : config.error().text);
    return config ? *config : Config{};
  }
};

TEST_F(TierString, SetsWhatTheSingleSettingsSet) {
  const Config config = of("GPU:SLRU:128,RAM:LFU:256,SSD:stream");
  EXPECT_EQ(config.gpu.policy, "slru");
  EXPECT_EQ(config.gpu.slots.kind, SlotsSpec::Kind::kCount);
  EXPECT_EQ(config.gpu.slots.value, 128);
  EXPECT_EQ(config.gpu.devices, "auto");
  EXPECT_EQ(config.policy, "lfu");
  EXPECT_EQ(config.slots.kind, SlotsSpec::Kind::kCount);
  EXPECT_EQ(config.slots.value, 256);
  EXPECT_EQ(config.pool_bytes, load("")->pool_bytes) << "what is not named keeps its default";
}

TEST_F(TierString, TakesEverySize) {
  const Config config = of("gpu:ewma:25%:8GiB:free-512MiB,ram:lru:12.5%:1GiB,ssd:STREAM:64MiB");
  EXPECT_EQ(config.gpu.slots.kind, SlotsSpec::Kind::kPercent);
  EXPECT_EQ(config.gpu.slots.value, 25);
  EXPECT_EQ(config.gpu.bytes, 8ull << 30);
  EXPECT_EQ(config.gpu.keep_free, 512ull << 20);
  EXPECT_EQ(config.slots.value, 12.5);
  EXPECT_EQ(config.pool_bytes, 1ull << 30);
  EXPECT_EQ(config.stream_bytes, 64ull << 20);
}

TEST_F(TierString, TakesTheScopeOfTheSlots) {
  EXPECT_EQ(of("RAM:lru:8:layer").slot_scope, SlotScope::kLayer);
  EXPECT_EQ(of("RAM:lru:Global:8:1GiB").slot_scope, SlotScope::kGlobal);
  EXPECT_EQ(of("RAM:lru:8").slot_scope, SlotScope::kGlobal) << "its default";
  EXPECT_EQ(load("", {"--pool-scope=layer"})->slot_scope, SlotScope::kLayer);
  EXPECT_EQ(of("RAM:lib:layer:8").policy, "lib:layer") << "a library of that name";
  EXPECT_EQ(of("RAM:lib:layer:8").slot_scope, SlotScope::kGlobal);
}

TEST_F(TierString, TakesWhetherTheRamTierPrefetches) {
  EXPECT_EQ(of("RAM:slru:25%").prefetch, "auto");
  EXPECT_EQ(of("RAM:slru:25%:prefetch=off").prefetch, "off");
  const Config config = of("RAM:lfu:halve=64:Prefetch=OFF:25%:1GiB");
  EXPECT_EQ(config.prefetch, "off");
  EXPECT_EQ(config.policy, "lfu:halve=64");
  EXPECT_THAT(print_tiers(config), HasSubstr("RAM:lfu:halve=64:25%:1GiB:global:prefetch=off,SSD"));
  EXPECT_EQ(of(print_tiers(config)).prefetch, "off");
  EXPECT_THAT(print_tiers(of("RAM:slru:25%:prefetch=auto")), Not(HasSubstr("prefetch")));
  EXPECT_EQ(load("", {"--tiers", "RAM:slru:25%", "--pool-prefetch", "off"})->prefetch, "off")
      << "the string does not name it";
  EXPECT_THAT(load("", {"--tiers", "RAM:slru:prefetch=maybe"}).error().text,
              HasSubstr("pool.prefetch = maybe: must be one of auto, off"));
  EXPECT_THAT(load("", {"--tiers", "GPU:slru:prefetch=off,RAM:lru"}).error().text,
              HasSubstr("only the tier RAM prefetches"));
  EXPECT_THAT(load("", {"--tiers", "RAM:slru:prefetch=off:prefetch=off"}).error().text, HasSubstr("twice"));
  EXPECT_THAT(load("", {"--tiers", "RAM:slru:prefetch=off", "--pool-prefetch", "off"}).error().text,
              HasSubstr("leave one of them out"));
}

TEST_F(TierString, TakesPoliciesWithOptionsWhoseCommasPartNoTiers) {
  const Config config = of(" RAM:slru:probation=50,admit=second-miss:8 , GPU:LFU:halve=64,admit=value:auto ");
  EXPECT_EQ(config.policy, "slru:probation=50,admit=second-miss");
  EXPECT_EQ(config.slots.value, 8);
  EXPECT_EQ(config.gpu.policy, "lfu:halve=64,admit=value");
  EXPECT_EQ(config.gpu.slots.kind, SlotsSpec::Kind::kAuto);
}

TEST_F(TierString, WhatIsFreeIsWhatIsAvailableLessThat) {
  const std::uint64_t little = of("RAM:lru:free-64MiB").pool_bytes,
                      less = of("RAM:lru:free-128MiB").pool_bytes;
  EXPECT_GT(little, 0u);
  EXPECT_NE(little, less);
  EXPECT_THAT(error("", {"--tiers=RAM:lru:free-8000TiB"}), HasSubstr("leaves nothing: "));
  EXPECT_THAT(error("", {"--tiers=RAM:lru:free-10%"}), HasSubstr("as in free-1GiB"));
}

TEST_F(TierString, ATierOfGpusThatIsLeftOutIsNotServed) {
  EXPECT_EQ(of("RAM:lru:8,SSD:stream").gpu.devices, "none");
  EXPECT_EQ(of("GPU:lru:8").gpu.devices, "auto");
  const Result<Config> named =
      load("[gpu]\ndevices = \"GPU-01234567-89ab-cdef-0123-456789abcdef\"\n", {"--tiers=GPU:lru:8"});
  ASSERT_TRUE(named) << named.error().text;
  EXPECT_EQ(named->gpu.devices, "GPU-01234567-89ab-cdef-0123-456789abcdef") << "it says which";
  EXPECT_EQ(load("[gpu]\ndevices = \"none\"\n", {"--tiers=GPU:lru:8"})->gpu.devices, "auto");
}

TEST_F(TierString, IsPrintedInFullAndParsesBackToTheSame) {
  EXPECT_EQ(print_tiers(of("GPU:SLRU:128,RAM:LFU:256:1GiB,SSD:stream")),
            "GPU:slru:128:free-1GiB:layer,RAM:lfu:256:1GiB:global,SSD:stream:32MiB");
  for (const char* tiers :
       {"GPU:SLRU:128,RAM:LFU:256,SSD:stream", "RAM:lru:1000001B", "RAM:slru:probation=50,admit=value:12.5%",
        "RAM:ARC:Layer:12.5%", "RAM:lru:7:1GiB:GLOBAL", "RAM:lib:global:7", "RAM:lib:global:layer:7",
        "GPU:ewma:decay=900:auto:1234567B:free-0,RAM:lru:auto,SSD:stream:64KiB", "GPU:lru:25%:global"}) {
    const Config config = of(tiers);
    const std::string printed = print_tiers(config);
    EXPECT_EQ(print_config(of(printed)), print_config(config)) << tiers;
    EXPECT_THAT(print_config(config), StartsWith("# tiers = \"" + printed + "\"\n"));
  }
}

TEST_F(TierString, StandsInTheFileAsWell) {
  const Result<Config> config = load("tiers = \"RAM:lfu:7,SSD:stream\"\n[log]\nlevel = \"debug\"\n");
  ASSERT_TRUE(config) << config.error().text;
  EXPECT_EQ(config->policy, "lfu");
  EXPECT_EQ(config->slots.value, 7);
  EXPECT_EQ(config->log_level, "debug");
  for (const char* toml : {"[tiers]\nram = \"lfu:7\"", "[tiers]\n", "tiers = 7"})
    EXPECT_THAT(error(toml), HasSubstr("above the first [section], tiers = \"GPU:")) << toml;
}

TEST_F(TierString, FlagsWinOverTheFileEitherWay) {
  const Result<Config> whole = load("[pool]\nslots = 9\nbytes = \"1GiB\"\n", {"--tiers=RAM:lfu:7"});
  ASSERT_TRUE(whole) << whole.error().text;
  EXPECT_EQ(whole->slots.value, 7);
  EXPECT_EQ(whole->pool_bytes, load("")->pool_bytes) << "it stands for the whole tier";
  const Result<Config> single = load("tiers = \"RAM:lfu:7:1GiB\"\n", {"--pool-slots=9"});
  ASSERT_TRUE(single) << single.error().text;
  EXPECT_EQ(single->slots.value, 9);
  EXPECT_EQ(single->pool_bytes, 1ull << 30);
}

TEST_F(TierString, BesideASingleSettingOfTheSameSourceItIsRefused) {
  EXPECT_EQ(error("", {"--tiers=RAM:lru:8", "--pool-slots=9"}),
            "--tiers sets pool.slots, and so does --pool-slots: leave one of them out");
  EXPECT_EQ(error("tiers = \"GPU:lru:8\"\n[gpu]\npolicy = \"ewma\"\n"),
            file() + ":1: tiers sets gpu.policy, and so does gpu.policy in line 3: leave one of them out");
  EXPECT_THAT(error("", {"--tiers=RAM:lru:8", "--gpu-devices=auto"}), HasSubstr("--gpu-devices"));
  EXPECT_THAT(error("", {"--tiers=GPU:lru:8", "--policy=fifo", "--tiers=RAM:lru"}),
              HasSubstr("policy.default"));
  EXPECT_TRUE(load("", {"--tiers=GPU:lru:8", "--pool-slots=9"})) << "another tier's";
}

TEST_F(TierString, ABadOneSaysWhatAndWhatToDo) {
  struct Case {
    const char *tiers, *text;
  };
  for (const Case& bad : std::initializer_list<Case>{
           {"TAPE:lru:8", "'TAPE' is no tier"},
           {"RAM:lru:8,NVME:stream", "'NVME' is no tier"},
           {"RAM:lru:8,ram:lfu:9", "'ram:lfu:9' names a tier for the second time"},
           {"RAM", "'RAM' names no policy: write RAM:POLICY:SIZE"},
           {"GPU:128", "'GPU:128' names no policy"},
           {"RAM:best:8", "policy.default = best: no policy 'best'; there are"},
           {"RAM:lru:size=3:8", "it has admit"},
           {"RAM:lru::8", "has an empty part"},
           {"RAM:lru:0", "pool.slots = 0: must be auto, a number of slots between 1 and 65536"},
           {"GPU:lru:101%", "gpu.slots = 101%: must be a share"},
           {"RAM:lru:8:9", "two sizes of one kind"},
           {"RAM:lru:1GiB:free-1GiB", "gives the memory twice"},
           {"RAM:lru:1KiB", "pool.bytes = 1kib: is 1KiB: it must be between 64KiB and"},
           {"RAM:lru:8GiX", "is not a size"},
           {"RAM:lru:8:global:layer", "has two scopes"},
           {"RAM:global", "names no policy"},
           {"SSD:stream:layer", "layer is for the tiers GPU and RAM"},
           {"SSD:lru", "write SSD:stream"},
           {"SSD:stream:25%", "write SSD:stream"},
           {"SSD", "write SSD:stream"}}) {
    EXPECT_THAT(error("", {std::string("--tiers=") + bad.tiers}),
                AllOf(StartsWith("--tiers: "), HasSubstr(bad.text)))
        << bad.tiers;
  }
  EXPECT_EQ(error("tiers = \"\""), file() +
                                       ":1: tiers: '' is no tier, there are GPU, RAM and SSD: write "
                                       "GPU:POLICY:SIZE,RAM:POLICY:SIZE,SSD:stream");
}

TEST_F(TierString, AFlagOutlivesAReload) {
  const Result<Config> running = load("", {"--tiers=RAM:lfu:7:1GiB"});
  ASSERT_TRUE(running) << running.error().text;
  EXPECT_THAT(request_.flag_keys, Contains("pool.slots"));
  write("[pool]\nslots = 9\n[policy]\ndefault = \"lru\"\n");
  std::vector<std::string> refused;
  const Result<Config> fresh = reload_config(*running, request_, &refused);
  ASSERT_TRUE(fresh) << fresh.error().text;
  EXPECT_EQ(print_tiers(*fresh), print_tiers(*running));
  EXPECT_TRUE(refused.empty());
}

}  // namespace
}  // namespace moecached
