#include "shim/ggml/weight_buffer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "shim/ggml/session.h"
#include "tests/unit/shim/fake_client.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

using shim::served_tensor;

class WeightBufferTest : public ::testing::Test {
 protected:
  void SetUp() override {
    reset_fake_daemon();
    shim::Session::instance().open();
    file_ = std::make_unique<ExpertFile>(folder_.file("model.gguf"), 1, 5);
    install_mini_host(file_->entries());
    file_->serve(3, 1 << 20);
  }

  // The bytes that the tensor has in the file.
  std::string bytes_in_file(const std::string& name, std::size_t bytes) const {
    const MappedFile mapped(file_->path());
    return {mapped.data() + file_->offset_of(name), bytes};
  }

  static std::string bytes_in_buffer(LoadedModel& model, const std::string& name, std::size_t bytes) {
    std::string data(bytes, '\0');
    model.buffer()->iface.get_tensor(model.buffer(), model.tensor(name), data.data(), 0, bytes);
    return data;
  }

  TemporaryFolder folder_;
  std::unique_ptr<ExpertFile> file_;
  const std::string gate_ = ExpertFile::name(0, "gate_exps.weight");
  const std::size_t gate_bytes_ = ExpertFile::kIn * ExpertFile::kOut * 5 * 4;
};

TEST_F(WeightBufferTest, KeepsNoBytesOfServedTensors) {
  LoadedModel model(*file_, 1, true);
  ASSERT_NE(served_tensor(model.tensor(gate_)), nullptr);
  EXPECT_EQ(permissions_at(model.tensor(gate_)->data), "---p");
  EXPECT_EQ(bytes_in_buffer(model, gate_, gate_bytes_), bytes_in_file(gate_, gate_bytes_))
      << "reads come from the file";
}

TEST_F(WeightBufferTest, MakesWindowsOfSlotsInTheShapeOfTheTensor) {
  LoadedModel model(*file_, 1, true);
  const ggml_tensor& window = served_tensor(model.tensor(gate_))->window->window;
  EXPECT_EQ(window.ne[0], ExpertFile::kIn);
  EXPECT_EQ(window.ne[1], ExpertFile::kOut);
  EXPECT_EQ(window.ne[2], 3);
  EXPECT_EQ(window.nb[1], ExpertFile::kIn * 4u);
  EXPECT_GT(window.nb[2], window.nb[1] * ExpertFile::kOut) << "the other parts of a record lie in between";
  const ggml_tensor& bias =
      served_tensor(model.tensor(ExpertFile::name(0, "down_exps.bias")))->window->window;
  EXPECT_EQ(bias.ne[0], ExpertFile::kIn);
  EXPECT_EQ(bias.ne[1], 3);
  EXPECT_EQ(bias.nb[1], window.nb[2]);
}

TEST_F(WeightBufferTest, LeavesOutATensorTheDaemonDoesNotKnow) {
  fake_daemon().layers[0].parts[0].name = "blk.0.other_exps.weight";
  LoadedModel model(*file_, 1, true);
  EXPECT_EQ(served_tensor(model.tensor(gate_)), nullptr);
  EXPECT_EQ(permissions_at(model.tensor(gate_)->data), "rw-p");
  EXPECT_EQ(std::string(static_cast<const char*>(model.tensor(gate_)->data), gate_bytes_),
            bytes_in_file(gate_, gate_bytes_));
  EXPECT_NE(served_tensor(model.tensor(ExpertFile::name(0, "up_exps.weight"))), nullptr)
      << "only that one is left out";
}

TEST_F(WeightBufferTest, LeavesOutATensorWhoseShapeTypeOrPlaceDiffers) {
  const auto parts = fake_daemon().layers[0].parts;
  for (int fault = 0; fault < 4; ++fault) {
    FakePart& part = fake_daemon().layers[0].parts[0];
    part = parts[0];
    if (fault == 0) part.ggml_type = GGML_TYPE_F16;
    if (fault == 1) part.ne1 += 1;
    if (fault == 2) part.file_offset += 32;
    if (fault == 3) part.expert_bytes += 4;
    LoadedModel model(*file_, 1, true);
    EXPECT_EQ(served_tensor(model.tensor(gate_)), nullptr) << "fault " << fault;
  }
}

TEST_F(WeightBufferTest, KeepsEverythingWhenTheDaemonRefusesTheModel) {
  fake_daemon().model_status = MOECACHED_E_REFUSED;
  LoadedModel model(*file_, 1, true);
  for (const char* part : {"gate_exps.weight", "up_exps.weight", "down_exps.weight", "down_exps.bias"}) {
    const ggml_tensor* tensor = model.tensor(ExpertFile::name(0, part));
    EXPECT_EQ(served_tensor(tensor), nullptr);
    EXPECT_EQ(permissions_at(tensor->data), "rw-p");
  }
}

TEST_F(WeightBufferTest, FindsTensorsThatWereReadInsteadOfMapped) {
  LoadedModel model(*file_, 1, true);
  const std::string bytes = bytes_in_file(gate_, gate_bytes_);
  const std::ifstream still_open(file_->path());
  ggml_tensor copy = *model.tensor(gate_);
  ggml_backend_buffer_type_t type = shim::weight_buffer_type();
  ggml_backend_buffer_t buffer = type->iface.alloc_buffer(type, gate_bytes_);
  copy.buffer = buffer;
  copy.data = buffer->iface.get_base(buffer);
  buffer->iface.set_tensor(buffer, &copy, bytes.data(), 0, bytes.size());
  EXPECT_NE(served_tensor(&copy), nullptr);
  EXPECT_EQ(fake_daemon().open_models, 1u) << "the same file is the same model";
  buffer->iface.free_buffer(buffer);
  delete buffer;
}

TEST_F(WeightBufferTest, LeavesOutATensorFromNowhere) {
  LoadedModel model(*file_, 1, true);
  std::string adapter(gate_bytes_, 'l');
  ggml_tensor lora = *model.tensor(gate_);
  std::strncpy(lora.name, "blk.0.ffn_gate_exps.weight.lora_a", sizeof lora.name - 1);
  ggml_backend_buffer_type_t type = shim::weight_buffer_type();
  ggml_backend_buffer_t buffer = type->iface.alloc_buffer(type, gate_bytes_);
  lora.buffer = buffer;
  lora.data = buffer->iface.get_base(buffer);
  buffer->iface.set_tensor(buffer, &lora, adapter.data(), 0, adapter.size());
  EXPECT_EQ(served_tensor(&lora), nullptr);
  EXPECT_EQ(std::memcmp(lora.data, adapter.data(), adapter.size()), 0);
  buffer->iface.free_buffer(buffer);
  delete buffer;
}

TEST_F(WeightBufferTest, AWriteToAServedTensorStartsFromTheBytesOfTheFile) {
  LoadedModel model(*file_, 1, true);
  std::string expected = bytes_in_file(gate_, gate_bytes_);
  expected.replace(40, 4, "abcd");
  model.buffer()->iface.set_tensor(model.buffer(), model.tensor(gate_), "abcd", 40, 4);
  EXPECT_EQ(served_tensor(model.tensor(gate_)), nullptr) << "the daemon's bytes are not those any more";
  EXPECT_EQ(bytes_in_buffer(model, gate_, gate_bytes_), expected);
  model.buffer()->iface.memset_tensor(model.buffer(), model.tensor(gate_), 'z', 0, 2);
  expected.replace(0, 2, "zz");
  EXPECT_EQ(bytes_in_buffer(model, gate_, gate_bytes_), expected);
}

TEST_F(WeightBufferTest, ClosesTheModelWithItsLastBuffer) {
  auto first = std::make_unique<LoadedModel>(*file_, 1, true);
  auto second = std::make_unique<LoadedModel>(*file_, 1, true);
  EXPECT_EQ(fake_daemon().open_models, 1u);
  first.reset();
  EXPECT_EQ(fake_daemon().open_models, 1u);
  second.reset();
  EXPECT_EQ(fake_daemon().open_models, 0u);
}

}  // namespace
}  // namespace moecached::testing
