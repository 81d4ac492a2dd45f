#include "daemon/control/translate.h"

#include <algorithm>

namespace moecached {
namespace {

void translate(const SsdStats& from, control::v1::Ssd* to) {
  to->set_engine(from.engine);
  to->set_direct(from.direct);
  to->set_registered_buffers(from.registered_buffers);
  to->set_fallback_reason(from.fallback_reason);
  to->set_requests(from.requests);
  to->set_reads(from.reads);
  to->set_bytes_wanted(from.bytes_wanted);
  to->set_bytes_read(from.bytes_read);
  to->set_errors(from.errors);
  to->set_latency_ns_total(from.latency_ns_total);
  to->set_latency_ns_max(from.latency_ns_max);
  to->set_depth_max(from.depth_max);
}

void add_layer(const LayerReport& layer, control::v1::Counters* to) {
  to->set_lookups(to->lookups() + layer.lookups);
  to->set_hits(to->hits() + layer.hits);
  to->set_misses(to->misses() + layer.misses);
  to->set_insertions(to->insertions() + layer.insertions);
  to->set_evictions(to->evictions() + layer.evictions);
  to->set_read_failures(to->read_failures() + layer.read_failures);
  to->set_leases(to->leases() + layer.leases);
  to->set_leases_queued(to->leases_queued() + layer.leases_queued);
  to->set_prefetched(to->prefetched() + layer.prefetched);
  to->set_prefetch_used(to->prefetch_used() + layer.prefetch_used);
  to->set_prefetch_late(to->prefetch_late() + layer.prefetch_late);
  to->set_prefetch_wasted(to->prefetch_wasted() + layer.prefetch_wasted);
  to->set_prefetch_regretted(to->prefetch_regretted() + layer.prefetch_regretted);
  to->set_device_hits(to->device_hits() + layer.device_hits);
  to->set_rises(to->rises() + layer.rises);
  to->set_swaps(to->swaps() + layer.swaps);
  to->set_resident(to->resident() + layer.resident + layer.device_resident);
  to->set_slots(to->slots() + layer.n_slots + layer.device_slots);
  to->set_experts(to->experts() + layer.n_experts);
}

void add_model(const ModelReport& model, control::v1::Counters* to) {
  for (const LayerReport& layer : model.layers) add_layer(layer, to);
  to->set_bytes_read(to->bytes_read() + model.bytes_read);
  to->set_streamed_parts(to->streamed_parts() + model.streamed_parts);
  to->set_streamed_bytes(to->streamed_bytes() + model.streamed_bytes);
  to->set_bytes_uploaded(to->bytes_uploaded() + model.bytes_uploaded);
  to->set_upload_ns(std::max(to->upload_ns(), model.upload_ns));
  to->set_bytes_in_place(to->bytes_in_place() + model.bytes_in_place);
  to->set_peer_hits(to->peer_hits() + model.peer_hits);
  to->set_bytes_from_peers(to->bytes_from_peers() + model.bytes_from_peers);
  to->set_bytes_demoted(to->bytes_demoted() + model.bytes_demoted);
  to->set_epochs(to->epochs() + model.epochs);
  to->set_slots_checked(to->slots_checked() + model.slots_checked);
  to->set_slots_corrupt(to->slots_corrupt() + model.slots_corrupt);
}

}  // namespace

void translate(const StatusReport& from, control::v1::Status* to) {
  to->set_version(from.version);
  to->set_boot_epoch(from.boot_epoch);
  to->set_pid(from.pid);
  to->set_uptime_seconds(from.uptime_seconds);
  to->set_control_socket(from.control_socket);
  to->set_handle_socket(from.handle_socket);
  to->set_pool_bytes_limit(from.pool_bytes_limit);
  to->set_pool_bytes_reserved(from.pool_bytes_reserved);
  to->set_pool_bytes_backed(from.pool_bytes_backed);
  to->set_sessions(from.sessions);
  to->set_models(from.models);
  for (const std::string& device : from.devices) to->add_devices(device);
  to->set_tiers(from.tiers);
  to->set_scrub(from.scrub);
  translate(from.ssd, to->mutable_ssd());
}

void translate(const PolicyReport& from, control::v1::Policy* to) {
  to->set_model(from.model);
  to->set_spec(from.spec);
  to->set_tier(from.tier);
  to->set_name(from.name);
  to->set_device(from.device);
}

void translate(const ModelReport& from, control::v1::Model* to) {
  to->set_id(from.id);
  to->set_name(from.name);
  to->set_architecture(from.architecture);
  to->set_policy(from.policy);
  to->set_sessions(from.sessions);
  to->set_n_expert_used(from.n_expert_used);
  to->set_expert_bytes_total(from.expert_bytes_total);
  to->set_pool_bytes(from.pool_bytes);
  to->set_pool_bytes_backed(from.pool_bytes_backed);
  to->set_changed_on_disk(from.changed_on_disk);
  to->set_bytes_read(from.bytes_read);
  to->set_streamed_parts(from.streamed_parts);
  to->set_streamed_bytes(from.streamed_bytes);
  to->set_device(from.device);
  to->set_loading(from.loading);
  to->set_device_bytes(from.device_bytes);
  to->set_bytes_uploaded(from.bytes_uploaded);
  to->set_bytes_in_place(from.bytes_in_place);
  to->set_epochs(from.epochs);
  for (const std::string& peer : from.peers) to->add_peers(peer);
  to->set_peer_hits(from.peer_hits);
  to->set_bytes_from_peers(from.bytes_from_peers);
  to->set_spills(from.spills);
  to->set_bytes_demoted(from.bytes_demoted);
  to->set_prefetch(from.prefetch);
  to->set_slots_checked(from.slots_checked);
  to->set_slots_corrupt(from.slots_corrupt);
  for (const LayerReport& layer : from.layers) {
    control::v1::Layer* out = to->add_layers();
    out->set_block(layer.block);
    out->set_n_experts(layer.n_experts);
    out->set_n_slots(layer.n_slots);
    out->set_resident(layer.resident);
    out->set_slot_class(layer.slot_class);
    out->set_slot_bytes(layer.slot_bytes);
    out->set_lookups(layer.lookups);
    out->set_hits(layer.hits);
    out->set_misses(layer.misses);
    out->set_insertions(layer.insertions);
    out->set_evictions(layer.evictions);
    out->set_read_failures(layer.read_failures);
    out->set_leases(layer.leases);
    out->set_leases_queued(layer.leases_queued);
    out->set_prefetched(layer.prefetched);
    out->set_prefetch_used(layer.prefetch_used);
    out->set_prefetch_late(layer.prefetch_late);
    out->set_prefetch_wasted(layer.prefetch_wasted);
    out->set_prefetch_regretted(layer.prefetch_regretted);
    out->set_device_slots(layer.device_slots);
    out->set_device_resident(layer.device_resident);
    out->set_device_hits(layer.device_hits);
    out->set_rises(layer.rises);
    out->set_swaps(layer.swaps);
  }
  for (const LeftOutReport& left_out : from.left_out) {
    control::v1::LeftOut* out = to->add_left_out();
    out->set_tensor(left_out.tensor);
    out->set_reason(left_out.reason);
  }
}

void translate(const SessionReport& from, control::v1::Session* to) {
  to->set_id(from.id);
  to->set_pid(from.pid);
  to->set_uid(from.uid);
  to->set_label(from.label);
  to->set_lanes(from.lanes);
  for (const std::uint32_t model : from.models) to->add_models(model);
  to->set_lookups(from.lookups);
  to->set_records(from.records);
  to->set_records_refused(from.records_refused);
  to->set_records_dropped(from.records_dropped);
  to->set_leases_pending(from.leases_pending);
  to->set_fallback_reads(from.fallback_reads);
  to->set_fallback_bytes(from.fallback_bytes);
  to->set_stalled(from.stalled);
  to->set_connected_seconds(from.connected_seconds);
}

void translate(const Finding& from, control::v1::Finding* to) {
  to->set_severity(from.severity);
  to->set_subject(from.subject);
  to->set_text(from.text);
}

Result<RouteOpen> route_open_of(const control::v1::RouteOpen& from) {
  RouteOpen open{.model = from.model(), .label = from.label(), .experts = from.experts()};
  switch (from.memory()) {
    case control::v1::ROUTE_MEMORY_NONE:
      return open;
    case control::v1::ROUTE_MEMORY_POOL:
      open.memory = RouteMemory::kPool;
      return open;
    case control::v1::ROUTE_MEMORY_CUDA_IPC:
      open.memory = RouteMemory::kCudaIpc;
      return open;
    default:
      return Fault{FaultCode::kInvalid, "memory " + std::to_string(from.memory()) +
                                            ": it must be one of control.proto's RouteMemory"};
  }
}

void translate(const RouteGeometry& from, control::v1::RouteGeometry* to) {
  to->set_model(from.model);
  to->set_name(from.name);
  to->set_boot_epoch(from.boot_epoch);
  to->set_n_expert_used(from.n_expert_used);
  to->set_ids_max(kRouteIdsMax);
  for (const RouteLayer& layer : from.layers) {
    control::v1::RouteLayer& out = *to->add_layers();
    out.set_block(layer.block);
    out.set_n_experts(layer.n_experts);
    out.set_n_slots(layer.n_slots);
    out.set_window_offset(layer.window_offset);
    out.set_slot_stride(layer.slot_stride);
    for (const RoutePart& part : layer.parts) {
      control::v1::RoutePart& of = *out.add_parts();
      of.set_name(part.name);
      of.set_ggml_type(part.ggml_type);
      of.set_ne0(part.ne0);
      of.set_ne1(part.ne1);
      of.set_expert_bytes(part.expert_bytes);
      of.set_slot_offset(part.slot_offset);
      of.set_file(part.file);
      of.set_file_offset(part.file_offset);
    }
  }
  if (!from.pool.path.empty()) {
    control::v1::RoutePool& pool = *to->mutable_pool();
    pool.set_path(from.pool.path);
    pool.set_bytes(from.pool.bytes);
    pool.set_device(from.pool.device);
    pool.set_inode(from.pool.inode);
  }
  if (!from.cuda.handle.empty()) {
    control::v1::RouteCudaIpc& cuda = *to->mutable_cuda();
    cuda.set_handle(from.cuda.handle);
    cuda.set_bytes(from.cuda.bytes);
    cuda.set_uuid(from.cuda.uuid);
  }
}

void translate(const RouteAnswer& from, std::uint64_t sequence, control::v1::RouteSlots* to) {
  to->Clear();
  to->set_sequence(sequence);
  to->mutable_slots()->Add(from.slots.begin(), from.slots.end());
  to->set_n_distinct(from.n_distinct);
  to->set_n_absent(from.n_absent);
  for (const RouteChange& change : from.changed) {
    control::v1::RouteEntry& entry = *to->add_changed();
    entry.set_expert(change.expert);
    entry.set_slot(change.slot);
  }
  to->set_has_more(from.has_more);
}

void translate(const StatsSource& from, control::v1::Stats* to) {
  to->set_boot_epoch(from.status.boot_epoch);
  to->set_uptime_seconds(from.status.uptime_seconds);
  to->set_pool_bytes_limit(from.status.pool_bytes_limit);
  to->set_pool_bytes_reserved(from.status.pool_bytes_reserved);
  to->set_pool_bytes_backed(from.status.pool_bytes_backed);
  translate(from.status.ssd, to->mutable_ssd());
  for (const ModelReport& model : from.models) {
    control::v1::ModelStats* out = to->add_models();
    out->set_id(model.id);
    out->set_name(model.name);
    out->set_prefetch(model.prefetch);
    add_model(model, out->mutable_counters());
    add_model(model, to->mutable_total());
    to->set_device_bytes(to->device_bytes() + model.device_bytes);
  }
  to->mutable_total();  // present even when there is no model
  to->set_sessions(static_cast<std::uint32_t>(from.sessions.size()));
  for (const SessionReport& session : from.sessions) {
    to->set_sessions_stalled(to->sessions_stalled() + (session.stalled ? 1 : 0));
    to->set_records_refused(to->records_refused() + session.records_refused);
    to->set_records_dropped(to->records_dropped() + session.records_dropped);
    to->set_fallback_reads(to->fallback_reads() + session.fallback_reads);
    to->set_fallback_bytes(to->fallback_bytes() + session.fallback_bytes);
  }
}

void translate(const RoutingEvent& from, std::span<const std::uint32_t> experts,
               control::v1::RoutingEvent* to) {
  to->set_lane(from.lane);
  to->set_layer(from.layer.value);
  to->set_graph(from.graph);
  to->set_token(from.token);
  to->set_n_tokens(from.n_tokens);
  to->set_prefill(from.prefill);
  to->mutable_experts()->Assign(experts.begin(), experts.end());
}

void translate(const PolicyComparison& from, control::v1::PolicyComparison* to) {
  to->set_model(from.model);
  for (const std::string& policy : from.policies) to->add_policies(policy);
  for (const LayerComparison& layer : from.layers) {
    control::v1::LayerComparison* out = to->add_layers();
    out->set_block(layer.block);
    out->set_n_experts(layer.n_experts);
    out->set_n_slots(layer.n_slots);
    out->set_window_lookups(layer.window_lookups);
    out->set_belady_hits(layer.belady_hits);
    out->set_belady_uploads(layer.belady_uploads);
    out->set_gini(layer.gini);
    out->set_entropy_bits(layer.entropy_bits);
    for (const PolicyScore& score : layer.policies) {
      control::v1::PolicyScore* policy = out->add_policies();
      policy->set_lookups(score.lookups);
      policy->set_hits(score.hits);
      policy->set_uploads(score.uploads);
      policy->set_link_experts(score.link_experts);
      policy->set_window_hits(score.window_hits);
      policy->set_covered(score.covered);
    }
  }
  to->set_dropped(from.dropped);
  to->set_forgotten(from.forgotten);
  for (const std::string& advice : from.advice) to->add_advice(advice);
}

}  // namespace moecached
