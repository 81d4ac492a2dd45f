#include "client/ctl/render.h"

#include <gmock/gmock.h>

namespace moecached::ctl {
namespace {

using testing::HasSubstr;
using testing::Not;

control::v1::Stats snapshot(double uptime_seconds, std::uint64_t lookups, std::uint64_t hits) {
  control::v1::Stats stats;
  stats.set_boot_epoch(1);
  stats.set_uptime_seconds(uptime_seconds);
  stats.mutable_total()->set_lookups(lookups);
  stats.mutable_total()->set_hits(hits);
  return stats;
}

TEST(RenderStats, GivesRatesBetweenTwoSnapshots) {
  const control::v1::Stats before = snapshot(10, 100, 0), after = snapshot(12, 300, 150);
  EXPECT_THAT(render(after, &before), HasSubstr("last 2.0 s  100 lookups/s, 75.0 % hits, 0 B/s read"));
  EXPECT_THAT(render(after, nullptr), Not(HasSubstr("lookups/s")));
  EXPECT_THAT(render(after, nullptr), HasSubstr("50.0 %"));
}

TEST(RenderStats, GivesNoRatesAcrossARestart) {
  const control::v1::Stats before = snapshot(10, 100, 0);
  control::v1::Stats after = snapshot(12, 300, 150);
  after.set_boot_epoch(2);
  EXPECT_THAT(render(after, &before), Not(HasSubstr("lookups/s")));
}

TEST(RenderDoctor, PutsTheWorstFirst) {
  control::v1::DoctorResponse response;
  for (const char* severity : {"ok", "warning", "error", "note"}) {
    control::v1::Finding* finding = response.add_findings();
    finding->set_severity(severity);
    finding->set_subject("s");
    finding->set_text(std::string("it is ").append(severity));
  }
  const std::string text = render(response);
  EXPECT_LT(text.find("it is error"), text.find("it is warning"));
  EXPECT_LT(text.find("it is warning"), text.find("it is note"));
  EXPECT_LT(text.find("it is note"), text.find("it is ok"));
}

TEST(RenderModels, ShowsWhatWasLeftOutAndWhatChanged) {
  control::v1::ListModelsResponse response;
  EXPECT_EQ(render(response, false), "no models\n");
  control::v1::Model* model = response.add_models();
  model->set_name("a\033b");
  model->set_changed_on_disk(true);
  model->add_left_out()->set_tensor("t");
  model->add_layers()->set_block(37);
  EXPECT_THAT(render(response, false), HasSubstr("changed on disk, 1 left out"));
  EXPECT_THAT(render(response, false), HasSubstr("a?b"));
  EXPECT_THAT(render(response, false), Not(HasSubstr("37")));
  EXPECT_THAT(render(response, true), HasSubstr("37"));
}

TEST(RenderSessions, SaysWhichAreStalled) {
  control::v1::ListSessionsResponse response;
  response.add_sessions()->set_stalled(true);
  EXPECT_THAT(render(response), HasSubstr("stalled"));
}

TEST(Render, AModelOnAGpuSaysWhereItIsAndWhatWentOverTheLink) {
  control::v1::ListModelsResponse models;
  control::v1::Model& model = *models.add_models();
  model.set_device("GPU-01234567-89ab-cdef-0123-456789abcdef");
  model.set_device_bytes(3u << 20);
  model.set_loading(true);
  EXPECT_THAT(render(models, false),
              HasSubstr("loading, GPU-01234567-89ab-cdef-0123-456789abcdef, 3.00 MiB of VRAM"));
  control::v1::Stats stats;
  EXPECT_THAT(render(stats, nullptr), Not(HasSubstr("VRAM"))) << "a host without a GPU need not read of one";
  stats.set_device_bytes(3u << 20);
  stats.mutable_total()->set_bytes_uploaded(5u << 20);
  stats.mutable_total()->set_bytes_in_place(7u << 20);
  EXPECT_THAT(render(stats, nullptr),
              HasSubstr("3.00 MiB of VRAM for slots, 5.00 MiB uploaded, 7.00 MiB read in place"));
  EXPECT_THAT(render(stats, nullptr), Not(HasSubstr("other GPUs")));
  model.add_peers("GPU-76543210-89ab-cdef-0123-456789abcdef");
  EXPECT_THAT(render(models, false), HasSubstr("reads slots of GPU-76543210-89ab-cdef-0123-456789abcdef"));
  stats.mutable_total()->set_peer_hits(11);
  stats.mutable_total()->set_bytes_from_peers(2u << 20);
  EXPECT_THAT(render(stats, nullptr), HasSubstr("2.00 MiB read on other GPUs (11 of the hits)"));
}

TEST(Render, SaysWhatPrefetchingBroughtWhereThereIsAny) {
  control::v1::Stats stats;
  control::v1::ModelStats* model = stats.add_models();
  model->set_id(3);
  model->set_prefetch("off");
  EXPECT_THAT(render(stats, nullptr), Not(HasSubstr("prefetch")));
  model->set_prefetch("paused");
  model->mutable_counters()->set_prefetched(100);
  model->mutable_counters()->set_prefetch_used(60);
  model->mutable_counters()->set_prefetch_late(7);
  model->mutable_counters()->set_prefetch_wasted(30);
  model->mutable_counters()->set_prefetch_regretted(2);
  EXPECT_THAT(render(stats, nullptr),
              testing::ContainsRegex(
                  "prefetch +model 3 paused, 100 read ahead, 60 used, 7 late, 30 wasted, 2 misses"));

  control::v1::ListModelsResponse models;
  models.add_models()->add_layers()->set_prefetched(41);
  EXPECT_THAT(render(models, true), Not(HasSubstr("PREFETCHED")));
  models.mutable_models(0)->set_prefetch("on");
  EXPECT_THAT(render(models, true), testing::AllOf(HasSubstr("PREFETCHED"), HasSubstr("41")));
}

}  // namespace
}  // namespace moecached::ctl
