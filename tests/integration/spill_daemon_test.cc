// The real client against the real daemon for a model that spills from a GPU, over a CUDA driver made of host
// memory: leases, moves between RAM and device slots, arrays, scratch slots and streams are the real ones,
// only kernels are loops of the CPU. Threads stand for backend instances: they resolve, read every byte of
// what they were given, end.
#include "tests/integration/spill_fixture.h"
#include "tests/support/soft_cuda/library.h"

namespace moecached {
namespace {

TEST_F(SpillDaemonTest, AModelThatIsToSpillIsRefusedAsOneThatRamHolds) {
  start_spill();
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* path = model_.c_str();
  moecached_gpu_model* covered = nullptr;
  EXPECT_EQ(moecached_gpu_model_open(session, &path, 1, gpu_at(0).uuid.data(), &covered), MOECACHED_E_SPILL);
  EXPECT_NE(std::string(moecached_last_error()).find("gpu.mode"), std::string::npos)
      << moecached_last_error();
  EXPECT_EQ(moecached_session_connected(session), 1) << "a refusal is an answer";
  moecached_model* spill = nullptr;
  EXPECT_EQ(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK);
  moecached_model* ram = nullptr;
  EXPECT_EQ(moecached_model_open(session, &path, 1, &ram), MOECACHED_OK);
  EXPECT_EQ(daemon_->models().size(), 2u) << "one in RAM alone has slots of its own";
  moecached_spill_lane* lane = nullptr;
  EXPECT_EQ(moecached_spill_lane_open(ram, &lane), MOECACHED_E_ARGUMENT);
  moecached_model_close(ram);
  moecached_model_close(spill);
  moecached_session_close(session);
}

TEST_F(SpillDaemonTest, NoModelSpillsWhereRamIsToHoldAll) {
  start_spill(GpuMode::kCovered);
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* path = model_.c_str();
  moecached_model* spill = nullptr;
  EXPECT_EQ(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill),
            MOECACHED_E_REFUSED);
  EXPECT_NE(std::string(moecached_last_error()).find("gpu.mode"), std::string::npos)
      << moecached_last_error();
  moecached_session_close(session);
}

TEST_F(SpillDaemonTest, AModelThatIsBeingOpenedMakesNoRoomForAnother) {
  max_models_ = 1;
  start_spill();
  const test::SoftCuda cuda;
  const auto open_session = [this] {
    moecached_session* session = nullptr;
    EXPECT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
    return session;
  };
  moecached_session* const first = open_session();
  moecached_session* const second = open_session();
  const char* path = model_.c_str();
  cuda.hold_next("cuMemHostRegister");  // as pinning a pool of hundreds of GB takes long
  moecached_model* spill = nullptr;
  std::thread opens([&] {
    EXPECT_EQ(moecached_spill_model_open(first, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK)
        << moecached_last_error();
  });
  EXPECT_TRUE(eventually([&] { return cuda.holds(); }));
  EXPECT_FALSE(daemon_->drop_model(report().id));
  moecached_model* ram = nullptr;
  EXPECT_EQ(moecached_model_open(second, &path, 1, &ram), MOECACHED_E_REFUSED) << "it would need its place";
  EXPECT_NE(std::string(moecached_last_error()).find("limits.models"), std::string::npos)
      << moecached_last_error();
  cuda.release();
  opens.join();
  if (spill != nullptr) moecached_model_close(spill);
  moecached_session_close(first);
  EXPECT_TRUE(eventually([&] { return moecached_model_open(second, &path, 1, &ram) == MOECACHED_OK; }))
      << "closed, it is idle";
  if (ram != nullptr) moecached_model_close(ram);
  moecached_session_close(second);
}

TEST_F(SpillDaemonTest, AModelThatCannotBePreparedGoes) {
  start_spill();
  const test::SoftCuda cuda;
  moecached_session* session = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* path = model_.c_str();
  moecached_model* spill = nullptr;
  cuda.fail_next("cuMemHostRegister", CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_NE(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK);
  EXPECT_TRUE(daemon_->models().empty());
  EXPECT_EQ(moecached_spill_model_open(session, &path, 1, gpu_at(0).uuid.data(), &spill), MOECACHED_OK)
      << moecached_last_error();
  if (spill != nullptr) moecached_model_close(spill);
  moecached_session_close(session);
}

TEST_F(SpillDaemonTest, EveryByteIsRightWhileExpertsMoveBetweenAllTiers) {
  start_spill();
  std::vector<std::thread> threads;
  std::array<SpillClient::Outcome, 3> outcomes;
  std::atomic<bool> stop{false};
  for (std::uint32_t t = 0; t < outcomes.size(); ++t) {
    threads.emplace_back([this, t, &outcomes, &stop] {
      SpillClient client(folder_, model_);
      if (t > 0) client.use_waits(kTopK);
      for (std::uint32_t round = 0; !stop.load(); ++round)
        outcomes[t] += client.tokens(t * 100 + round, 400, round);
    });
  }
  const bool enough = eventually([this] { return sum().swaps > 300 && sum().device_hits > 10'000; });
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  SpillClient::Outcome all;
  for (const auto& outcome : outcomes) all += outcome;
  const LayerReport counted = sum();
  EXPECT_TRUE(enough) << counted.swaps << " swaps, " << counted.device_hits << " device hits";
  EXPECT_EQ(all.wrong, 0u) << "of " << all.slots;
  EXPECT_GT(all.device_slots, 1000u);
  EXPECT_GT(outcomes[1].waited + outcomes[2].waited, 500u);
  EXPECT_GT(counted.misses, 0u);
  EXPECT_EQ(counted.hits + counted.misses, counted.lookups);
  EXPECT_LE(counted.device_resident, kDeviceSlots * kLayers);
  std::printf(
      "%zu slots read, %zu on the device; %llu lookups: %llu device, %llu RAM, %llu disk; %llu rises, %llu "
      "swaps\n",
      all.slots, all.device_slots, static_cast<unsigned long long>(counted.lookups),
      static_cast<unsigned long long>(counted.device_hits),
      static_cast<unsigned long long>(counted.hits - counted.device_hits),
      static_cast<unsigned long long>(counted.misses), static_cast<unsigned long long>(counted.rises),
      static_cast<unsigned long long>(counted.swaps));
}

TEST_F(SpillDaemonTest, CanaryWithoutGracePeriodsBytesAreWrong) {
  const Variable no_grace("MOECACHED_TEST_NO_GRACE");
  start_spill();
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  std::atomic<std::size_t> wrong{0};
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([this, t, &stop, &wrong] {
      SpillClient client(folder_, model_);
      if (t > 0) client.use_waits(kTopK);
      for (std::uint32_t round = 0; !stop.load(); ++round)
        wrong += client.tokens(t * 100 + round, 100, 5 * t + round).wrong;
    });
  }
  EXPECT_TRUE(eventually([&] { return wrong.load() > 0; }))
      << "a test that compares bytes would not see a slot that is reused";
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(SpillDaemonTest, AnExpertIsInVramOrInRamAndBothTogetherCanHoldAll) {
  start_spill(GpuMode::kSpill, kExperts - kRamSlots);
  SpillClient client(folder_, model_);
  std::uint32_t seed = 0;
  EXPECT_TRUE(eventually([&] {
    ++seed;
    EXPECT_EQ(client.tokens(seed, 50, seed).wrong, 0u);
    const LayerReport all = sum();
    std::uint32_t in_ram = 0;
    for (const LayerReport& layer : report().layers) in_ram += layer.resident;
    return all.device_resident + in_ram == kExperts * kLayers;
  })) << "sixteen experts in six slots of RAM and ten of the device";
  const std::uint64_t read = report().bytes_read;
  EXPECT_EQ(client.tokens(1, 400, 0).wrong, 0u);
  EXPECT_EQ(report().bytes_read, read) << "nothing is read from disk any more: what comes down is waited for";
}

TEST_F(SpillDaemonTest, ModelsThatSpillAndModelsThatDoNotShareWhatAGpuMayHold) {
  gpu_bytes_ = 40u << 20;  // enough for either
  for (const bool spill_first : {true, false}) {
    SCOPED_TRACE(spill_first);
    daemon_.reset();
    start_spill(GpuMode::kAuto);
    SpillClient spills(folder_, model_);
    GpuClient covered(folder_, model_);
    const auto bytes = [this](bool of_spill) {
      std::uint64_t sum = 0;
      for (const ModelReport& model : daemon_->models())
        sum += model.spills == of_spill ? model.device_bytes : 0;
      return sum;
    };
    const auto compute = [&](bool spill) {
      const std::size_t wrong = spill ? spills.tokens(1, 20, 0).wrong : covered.graphs(1, 20).wrong;
      EXPECT_EQ(wrong, 0u);
    };
    EXPECT_TRUE(eventually([&] {
      compute(spill_first);
      return bytes(spill_first) > 0;
    }));
    EXPECT_TRUE(eventually([&] {
      compute(!spill_first);
      return bytes(!spill_first) > 0 || std::ranges::any_of(daemon_->doctor(), [](const Finding& finding) {
               return finding.text.find("gpu.bytes") != std::string::npos;
             });
    }));
    EXPECT_LE(bytes(true) + bytes(false), gpu_bytes_);
  }
}

TEST_F(SpillDaemonTest, PartsOfAllExpertsAreLoadedFromAllTiersToWhereTheFileHasThem) {
  start_spill();
  SpillClient client(folder_, model_);
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return sum().device_resident >= 6;
  }));
  std::vector<std::int32_t> all, odd;
  for (std::int32_t e = 0; e < static_cast<std::int32_t>(kExperts); ++e) {
    all.push_back(e);
    if (e % 2 == 1 || e > 11) odd.push_back(e);
  }
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(client.whole(layer, all).wrong, 0u);
    EXPECT_EQ(client.whole(layer, odd).wrong, 0u);
  }
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_GT(counters.streamed_experts, 0u);
  EXPECT_EQ(counters.fallback_reads, 0u);
}

TEST_F(SpillDaemonTest, MoreExpertsThanSlotsAreNotWaitedFor) {
  start_spill();
  SpillClient client(folder_, model_);
  std::vector<std::int32_t> ids;
  for (std::int32_t e = 0; e < static_cast<std::int32_t>(kRamSlots) + 1; ++e) ids.push_back(e);
  EXPECT_EQ(client.resolve(0, ids).too_many, 1u);
  ids.pop_back();
  EXPECT_EQ(client.resolve(0, ids).wrong, 0u);
  moecached_spill_end(client.lane());
}

TEST_F(SpillDaemonTest, TwoLanesThatNeedAllSlotsTakeTurns) {
  start_spill();
  std::vector<std::thread> threads;
  std::atomic<std::size_t> wrong{0}, done{0};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      SpillClient client(folder_, model_);
      std::vector<std::int32_t> ids;
      for (std::int32_t e = 0; e < static_cast<std::int32_t>(kRamSlots); ++e)
        ids.push_back(t == 0 ? e : 15 - e);
      for (int i = 0; i < 300; ++i) {
        const auto outcome = client.resolve(static_cast<std::uint32_t>(i) % kLayers, ids);
        wrong += outcome.wrong;
        done += outcome.slots > 0 ? 1 : 0;
      }
      moecached_spill_end(client.lane());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_EQ(done.load(), 600u);
}

TEST_F(SpillDaemonTest, LanesGoOnFromTheFileWhenTheDaemonIsGone) {
  start_spill();
  SpillClient client(folder_, model_);
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return sum().device_resident >= 6;
  }));
  client.use_waits(kTopK);
  EXPECT_EQ(client.tokens(6, 50, 0).waited, 50u);
  daemon_.reset();
  EXPECT_EQ(client.tokens(7, 200, 9).wrong, 0u);
  std::vector<std::int32_t> all;
  for (std::int32_t e = 0; e < static_cast<std::int32_t>(kExperts); ++e) all.push_back(e);
  EXPECT_EQ(client.whole(1, all).wrong, 0u);
  moecached_counters counters{};
  moecached_model_counters(client.model(), &counters);
  EXPECT_GT(counters.fallback_reads, 0u);
  start_spill();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // a reconnect is tried that often
  EXPECT_EQ(moecached_session_reconnect(client.session()), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(client.tokens(8, 200, 3).wrong, 0u);
  EXPECT_GT(sum().lookups, 0u) << "the next daemon serves it";
  const auto waiting = client.tokens(9, 200, 5);
  EXPECT_EQ(waiting.wrong, 0u);
  EXPECT_EQ(waiting.waited, 200u) << "its memory can be waited for as well";
}

TEST_F(SpillDaemonTest, ALaneThatWasIdleFindsTheDaemonThatServesNow) {
  start_spill();
  SpillClient client(folder_, model_);
  moecached_spill_lane* idle = nullptr;
  ASSERT_EQ(moecached_spill_lane_open(client.model(), &idle), MOECACHED_OK) << moecached_last_error();
  std::uint32_t seed = 0;
  ASSERT_TRUE(eventually([&] {
    EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
    return client.has_device_slots();
  }));
  moecached_spill_lane* const busy = client.exchange_lane(idle);
  EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
  const std::uint64_t generation = moecached_spill_lane_generation(idle);
  client.exchange_lane(busy);
  // Twice, so that what the second daemon gives may lie where that of the first one lay.
  for (int i = 0; i < 2; ++i) {
    daemon_.reset();
    start_spill();
    EXPECT_TRUE(eventually([&] { return moecached_session_reconnect(client.session()) == MOECACHED_OK; }))
        << moecached_last_error();
  }
  EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
  client.exchange_lane(idle);
  EXPECT_EQ(client.tokens(++seed, 50, 0).wrong, 0u);
  EXPECT_GT(moecached_spill_lane_generation(idle), generation)
      << "device slots of a daemon that is gone are looked for no more";
  client.exchange_lane(busy);
  moecached_spill_lane_close(idle);
}

TEST_F(SpillDaemonTest, NothingStaysPageLockedOfADaemonThatIsGone) {
  start_spill();
  const test::SoftCuda cuda;
  SpillClient client(folder_, model_);
  moecached_spill_lane* idle = nullptr;
  ASSERT_EQ(moecached_spill_lane_open(client.model(), &idle), MOECACHED_OK) << moecached_last_error();
  daemon_.reset();
  start_spill();
  const std::string calls = cuda.calls_of([&] {
    EXPECT_TRUE(eventually([&] { return moecached_session_reconnect(client.session()) == MOECACHED_OK; }))
        << moecached_last_error();
  });
  std::size_t n_unlocked = 0;
  for (std::size_t at = 0; (at = calls.find("cuMemHostUnregister", at)) != std::string::npos; ++at)
    ++n_unlocked;
  EXPECT_EQ(n_unlocked, kLayers + 2) << "the windows, and the stream buffers of two lanes: what is mapped at "
                                        "their addresses next would be read as what was";
  EXPECT_EQ(client.tokens(1, 50, 0).wrong, 0u);
  moecached_spill_lane_close(idle);
}

}  // namespace
}  // namespace moecached
