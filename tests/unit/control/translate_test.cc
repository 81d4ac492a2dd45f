#include "daemon/control/translate.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

namespace moecached {
namespace {

// A field that stays at its default was forgotten: every source below sets every field to something else.
void expect_every_field_set(const google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = message.GetDescriptor()->field(i);
    const bool set =
        field->is_repeated() ? reflection.FieldSize(message, field) > 0 : reflection.HasField(message, field);
    EXPECT_TRUE(set) << field->full_name();
  }
}

const SsdStats kSsd = {.engine = "pread",
                       .direct = true,
                       .registered_buffers = true,
                       .fallback_reason = "because",
                       .requests = 1,
                       .reads = 2,
                       .bytes_wanted = 3,
                       .bytes_read = 4,
                       .errors = 5,
                       .latency_ns_total = 6,
                       .latency_ns_max = 7,
                       .depth_max = 8};
const LayerReport kLayer = {.block = 1,
                            .n_experts = 2,
                            .n_slots = 3,
                            .resident = 4,
                            .slot_class = 5,
                            .slot_bytes = 6,
                            .lookups = 7,
                            .hits = 8,
                            .misses = 9,
                            .insertions = 10,
                            .evictions = 11,
                            .read_failures = 12,
                            .leases = 13,
                            .leases_queued = 14,
                            .device_slots = 20,
                            .device_resident = 21,
                            .device_hits = 22,
                            .rises = 23,
                            .swaps = 24,
                            .prefetched = 15,
                            .prefetch_used = 16,
                            .prefetch_late = 17,
                            .prefetch_wasted = 18,
                            .prefetch_regretted = 19};

StatusReport status_report() {
  return {.version = "v",
          .boot_epoch = 1,
          .pid = 2,
          .uptime_seconds = 3,
          .control_socket = "c",
          .handle_socket = "h",
          .pool_bytes_limit = 4,
          .pool_bytes_reserved = 5,
          .pool_bytes_backed = 6,
          .sessions = 7,
          .models = 8,
          .devices = {"host"},
          .tiers = "RAM:slru:auto:1GiB,SSD:stream:32MiB",
          .scrub = "each slot every 1800 s",
          .ssd = kSsd};
}

ModelReport model_report(std::uint32_t id) {
  return {.id = id,
          .name = "n",
          .architecture = "a",
          .policy = "p",
          .sessions = 1,
          .n_expert_used = 2,
          .expert_bytes_total = 3,
          .pool_bytes = 4,
          .pool_bytes_backed = 5,
          .changed_on_disk = true,
          .bytes_read = 6,
          .streamed_parts = 7,
          .streamed_bytes = 8,
          .device = "GPU-",
          .spills = true,
          .loading = true,
          .device_bytes = 9,
          .bytes_uploaded = 10,
          .bytes_demoted = 17,
          .upload_ns = 11,
          .bytes_in_place = 12,
          .peers = std::vector<std::string>(1, "GPU-1"),
          .peer_hits = 14,
          .bytes_from_peers = 15,
          .epochs = 13,
          .slots_checked = 16,
          .slots_corrupt = 17,
          .layers = {kLayer, kLayer},
          .left_out = {{"t", "r"}}};
}

SessionReport session_report() {
  return {.id = 1,
          .pid = 2,
          .uid = 3,
          .label = "l",
          .lanes = 4,
          .models = {5},
          .lookups = 6,
          .records = 7,
          .records_refused = 8,
          .records_dropped = 9,
          .leases_pending = 10,
          .fallback_reads = 11,
          .fallback_bytes = 12,
          .stalled = true,
          .connected_seconds = 13};
}

TEST(Translate, ForgetsNoFieldOfAStatus) {
  control::v1::Status out;
  translate(status_report(), &out);
  expect_every_field_set(out);
  expect_every_field_set(out.ssd());
}

TEST(Translate, ForgetsNoFieldOfAModel) {
  control::v1::Model out;
  translate(model_report(1), &out);
  expect_every_field_set(out);
  expect_every_field_set(out.layers(0));
  expect_every_field_set(out.left_out(0));
}

TEST(Translate, ForgetsNoFieldOfASessionOrFinding) {
  control::v1::Session session;
  translate(session_report(), &session);
  expect_every_field_set(session);
  control::v1::Finding finding;
  translate(Finding{"error", "ssd", "text"}, &finding);
  expect_every_field_set(finding);
}

TEST(Translate, StatsAreSumsOverLayersModelsAndSessions) {
  const StatusReport status = status_report();
  const std::vector<ModelReport> models = {model_report(1), model_report(2)};
  const std::vector<SessionReport> sessions = {session_report(), session_report(), session_report()};
  control::v1::Stats out;
  translate(StatsSource{.status = status, .models = models, .sessions = sessions}, &out);
  expect_every_field_set(out);
  expect_every_field_set(out.total());
  ASSERT_EQ(out.models_size(), 2);
  EXPECT_EQ(out.models(1).id(), 2u);
  EXPECT_EQ(out.models(0).counters().lookups(), 2 * kLayer.lookups);
  EXPECT_EQ(out.total().lookups(), 4 * kLayer.lookups);
  EXPECT_EQ(out.total().hits(), 4 * kLayer.hits);
  EXPECT_EQ(out.total().bytes_read(), 12u);
  EXPECT_EQ(out.total().slots(), 4 * (kLayer.n_slots + kLayer.device_slots));
  EXPECT_EQ(out.sessions(), 3u);
  EXPECT_EQ(out.sessions_stalled(), 3u);
  EXPECT_EQ(out.fallback_reads(), 33u);
  EXPECT_EQ(out.fallback_bytes(), 36u);
  EXPECT_EQ(out.records_refused(), 24u);
  EXPECT_EQ(out.records_dropped(), 27u);
}

TEST(Translate, StatsOfAnIdleDaemonHaveATotal) {
  const StatusReport status;
  control::v1::Stats out;
  translate(StatsSource{.status = status, .models = {}, .sessions = {}}, &out);
  EXPECT_TRUE(out.has_total());
}

}  // namespace
}  // namespace moecached
