#include "client/ctl/render.h"

#include <algorithm>
#include <cstdio>

#include "client/ctl/table.h"

namespace moecached::ctl {
namespace {

using namespace control::v1;  // NOLINT(google-build-using-namespace): the messages are this file's vocabulary

std::string number(std::uint64_t value) { return std::to_string(value); }

std::string describe(const Ssd& ssd) {
  std::string text = ssd.engine();
  if (ssd.direct()) text += ", O_DIRECT";
  if (ssd.registered_buffers()) text += ", registered buffers";
  if (!ssd.fallback_reason().empty()) text += " (" + printable(ssd.fallback_reason()) + ")";
  return text;
}

std::string pool(std::uint64_t backed, std::uint64_t reserved, std::uint64_t limit) {
  return human_size(backed) + " in memory, " + human_size(reserved) + " reserved, limit " + human_size(limit);
}

std::string join(const google::protobuf::RepeatedField<std::uint32_t>& numbers) {
  std::string text;
  for (const std::uint32_t value : numbers) text.append(text.empty() ? "" : ",").append(number(value));
  return text.empty() ? "-" : text;
}

std::vector<std::string> counters_row(const std::string& id, const std::string& name, const Counters& c) {
  return {id,
          name,
          number(c.lookups()),
          number(c.hits()),
          percent(c.hits(), c.lookups()),
          number(c.misses()),
          number(c.evictions()),
          number(c.resident()) + "/" + number(c.slots()),
          human_size(c.bytes_read()),
          human_size(c.streamed_bytes())};
}

// Counters of one daemon only grow; of another start they do not compare.
std::string rates(const Stats& now, const Stats& before) {
  const double seconds = now.uptime_seconds() - before.uptime_seconds();
  if (now.boot_epoch() != before.boot_epoch() || seconds <= 0) return "";
  const auto grown = [](std::uint64_t later, std::uint64_t earlier) {
    return later >= earlier ? later - earlier : 0;
  };
  const std::uint64_t lookups = grown(now.total().lookups(), before.total().lookups());
  const std::uint64_t hits = grown(now.total().hits(), before.total().hits());
  const std::uint64_t bytes = grown(now.ssd().bytes_read(), before.ssd().bytes_read());
  char text[160];
  std::snprintf(text, sizeof text, "last %.1f s  %.0f lookups/s, %s hits, %s/s read\n", seconds,
                static_cast<double>(lookups) / seconds, percent(hits, lookups).c_str(),
                human_size(static_cast<std::uint64_t>(static_cast<double>(bytes) / seconds)).c_str());
  return text;
}

bool prefetches(const std::string& state) { return !state.empty() && state != "off"; }

std::string layer_table(const Model& model) {
  std::vector<std::string> head = {">BLOCK",   ">EXPERTS",  ">SLOTS",     ">RESIDENT", ">CLASS", ">SLOT SIZE",
                                   ">LOOKUPS", ">HIT RATE", ">EVICTIONS", ">FAILED",   ">LEASES"};
  const bool has_prefetch = prefetches(model.prefetch());
  if (has_prefetch) head.insert(head.end(), {">PREFETCHED", ">USED", ">LATE", ">WASTED"});
  if (model.spills()) head.insert(head.end(), {">VRAM SLOTS", ">IN VRAM", ">VRAM HITS", ">RISES", ">SWAPS"});
  Table table(head);
  for (const Layer& layer : model.layers()) {
    std::vector<std::string> row = {number(layer.block()),      number(layer.n_experts()),
                                    number(layer.n_slots()),    number(layer.resident()),
                                    number(layer.slot_class()), human_size(layer.slot_bytes()),
                                    number(layer.lookups()),    percent(layer.hits(), layer.lookups()),
                                    number(layer.evictions()),  number(layer.read_failures()),
                                    number(layer.leases())};
    if (has_prefetch) {
      row.insert(row.end(), {number(layer.prefetched()), number(layer.prefetch_used()),
                             number(layer.prefetch_late()), number(layer.prefetch_wasted())});
    }
    if (model.spills()) {
      row.insert(row.end(), {number(layer.device_slots()), number(layer.device_resident()),
                             percent(layer.device_hits(), layer.lookups()), number(layer.rises()),
                             number(layer.swaps())});
    }
    table.add(row);
  }
  return table.text();
}

}  // namespace

std::string render(const Status& status) {
  Table table({"moecached", printable(status.version())});
  table.add({"pid", number(status.pid())});
  table.add({"up", human_seconds(status.uptime_seconds())});
  table.add({"sessions", number(status.sessions())});
  table.add({"models", number(status.models())});
  table.add(
      {"pool", pool(status.pool_bytes_backed(), status.pool_bytes_reserved(), status.pool_bytes_limit())});
  std::string devices;
  for (const std::string& device : status.devices())
    devices.append(devices.empty() ? "" : ", ").append(device);
  table.add({"tiers", status.tiers().empty() ? "-" : printable(status.tiers())});
  table.add({"devices", devices.empty() ? "-" : devices});
  table.add({"ssd", describe(status.ssd())});
  table.add({"scrub", status.scrub().empty() ? "-" : printable(status.scrub())});
  table.add({"control", printable(status.control_socket())});
  table.add({"handle", printable(status.handle_socket())});
  return table.text();
}

std::string render(const ListModelsResponse& response, bool layers) {
  if (response.models().empty()) return "no models\n";
  Table table({">ID", "NAME", "ARCHITECTURE", "POLICY", ">SESSIONS", ">LAYERS", ">EXPERTS IN FILE", ">POOL",
               ">IN MEMORY", ">RESIDENT", ">HIT RATE", "NOTES"});
  std::string below;
  for (const Model& model : response.models()) {
    std::uint64_t resident = 0, slots = 0, lookups = 0, hits = 0;
    for (const Layer& layer : model.layers()) {
      resident += layer.resident() + layer.device_resident();
      slots += layer.n_slots() + layer.device_slots();
      lookups += layer.lookups();
      hits += layer.hits();
    }
    std::string notes = model.changed_on_disk() ? "changed on disk" : "";
    const auto note = [&notes](const std::string& text) {
      notes.append(notes.empty() ? "" : ", ").append(text);
    };
    if (model.loading()) note("loading");
    if (model.device().starts_with("GPU-")) {
      note(model.device() + ", " + human_size(model.device_bytes()) + " of VRAM, pool is pinned memory");
      if (model.spills()) note("spills: experts are in VRAM, in RAM, or on disk");
      for (const std::string& peer : model.peers()) note("reads slots of " + printable(peer));
    }
    if (!model.left_out().empty()) {
      note(number(static_cast<std::uint64_t>(model.left_out_size())) + " left out");
    }
    table.add({number(model.id()), printable(model.name()), printable(model.architecture()),
               printable(model.policy()), number(model.sessions()),
               number(static_cast<std::uint64_t>(model.layers_size())),
               human_size(model.expert_bytes_total()), human_size(model.pool_bytes()),
               human_size(model.pool_bytes_backed()), number(resident) + "/" + number(slots),
               percent(hits, lookups), notes});
    if (layers) below += "\nmodel " + number(model.id()) + "\n" + layer_table(model);
  }
  return table.text() + below;
}

std::string render(const ListSessionsResponse& response) {
  if (response.sessions().empty()) return "no sessions\n";
  Table table({">ID", ">PID", ">UID", "LABEL", ">LANES", "MODELS", ">LOOKUPS", ">RECORDS", ">DROPPED",
               ">REFUSED", ">FALLBACK READS", ">FALLBACK BYTES", ">CONNECTED", "STATE"});
  for (const Session& session : response.sessions()) {
    table.add({number(session.id()), session.pid() == 0 ? "-" : number(session.pid()), number(session.uid()),
               printable(session.label()), number(session.lanes()), join(session.models()),
               number(session.lookups()), number(session.records()), number(session.records_dropped()),
               number(session.records_refused()), number(session.fallback_reads()),
               human_size(session.fallback_bytes()), human_seconds(session.connected_seconds()),
               session.stalled()              ? "stalled"
               : session.leases_pending() > 0 ? "waiting"
                                              : "ok"});
  }
  return table.text();
}

std::string render(const Stats& stats, const Stats* before) {
  Table table({">ID", "MODEL", ">LOOKUPS", ">HITS", ">HIT RATE", ">MISSES", ">EVICTIONS", ">RESIDENT",
               ">READ", ">STREAMED"});
  for (const ModelStats& model : stats.models()) {
    table.add(counters_row(number(model.id()), printable(model.name()), model.counters()));
  }
  table.add(counters_row("", "total", stats.total()));
  std::string text = table.text() + "\n";

  Table facts(
      {"pool", pool(stats.pool_bytes_backed(), stats.pool_bytes_reserved(), stats.pool_bytes_limit())});
  facts.add({"sessions",
             number(stats.sessions()) +
                 (stats.sessions_stalled() > 0 ? ", " + number(stats.sessions_stalled()) + " stalled" : "")});
  facts.add({"records",
             number(stats.records_dropped()) + " dropped, " + number(stats.records_refused()) + " refused"});
  facts.add({"fallback", number(stats.fallback_reads()) + " reads by clients themselves, " +
                             human_size(stats.fallback_bytes())});
  for (const ModelStats& model : stats.models()) {
    if (!prefetches(model.prefetch())) continue;
    const Counters& c = model.counters();
    facts.add({"prefetch", "model " + number(model.id()) + " " + printable(model.prefetch()) + ", " +
                               number(c.prefetched()) + " read ahead, " + number(c.prefetch_used()) +
                               " used, " + number(c.prefetch_late()) + " late, " +
                               number(c.prefetch_wasted()) + " wasted, " + number(c.prefetch_regretted()) +
                               " misses of what they displaced"});
  }
  if (const Counters& total = stats.total(); total.slots_checked() > 0) {
    facts.add({"scrub", number(total.slots_checked()) + " slots compared with their files, " +
                            number(total.slots_corrupt()) + " wrong"});
  }
  if (const Counters& total = stats.total(); stats.device_bytes() > 0 || total.epochs() > 0) {
    facts.add(
        {"gpu", human_size(stats.device_bytes()) + " of VRAM for slots, " +
                    human_size(total.bytes_uploaded()) + " uploaded, " + human_size(total.bytes_in_place()) +
                    " read in place over the link, " +
                    (total.peer_hits() == 0 ? ""
                                            : human_size(total.bytes_from_peers()) + " read on other GPUs (" +
                                                  number(total.peer_hits()) + " of the hits), ") +
                    number(total.epochs()) + " graphs"});
  }
  if (const Counters& total = stats.total(); total.rises() > 0) {
    facts.add({"spill", number(total.device_hits()) + " of the hits in VRAM, " + number(total.rises()) +
                            " experts moved up, for " + number(total.swaps()) +
                            " of which another came down (" + human_size(total.bytes_demoted()) + ")"});
  }
  const Ssd& ssd = stats.ssd();
  facts.add({"ssd", describe(ssd)});
  char mean[64] = "-";
  if (ssd.requests() > 0) {
    std::snprintf(mean, sizeof mean, "%.0f us mean, %.0f us worst",
                  static_cast<double>(ssd.latency_ns_total()) / static_cast<double>(ssd.requests()) / 1e3,
                  static_cast<double>(ssd.latency_ns_max()) / 1e3);
  }
  facts.add({"reads", number(ssd.requests()) + " requests in " + number(ssd.reads()) + " reads, " +
                          human_size(ssd.bytes_read()) + ", depth up to " + number(ssd.depth_max()) + ", " +
                          number(ssd.errors()) + " errors"});
  facts.add({"latency", mean});
  text += facts.text();
  if (before != nullptr) text += rates(stats, *before);
  return text;
}

std::string render(const ListPoliciesResponse& response) {
  Table table({"TIER", ">MODEL", "NAME", "DEVICE", "POLICY"});
  for (const Policy& policy : response.policies()) {
    table.add({policy.tier(), policy.model() == 0 ? "new ones" : number(policy.model()),
               printable(policy.name()), policy.device(), printable(policy.spec())});
  }
  return table.text();
}

std::string render(const DoctorResponse& response) {
  if (response.findings().empty()) return "nothing to report\n";
  // Worst first; the order of equals is the daemon's.
  const auto rank = [](const Finding* finding) {
    if (finding->severity() == "error") return 0;
    if (finding->severity() == "warning") return 1;
    return finding->severity() == "note" ? 2 : 3;
  };
  std::vector<const Finding*> findings;
  for (const Finding& finding : response.findings()) findings.push_back(&finding);
  std::ranges::stable_sort(findings, {}, rank);
  Table table({"SEVERITY", "SUBJECT", "FINDING"});
  for (const Finding* finding : findings) {
    table.add({printable(finding->severity()), printable(finding->subject()), printable(finding->text())});
  }
  return table.text();
}

}  // namespace moecached::ctl
