#include "shim/ggml/moe_device.h"

#include <gtest/gtest.h>

#include "shim/ggml/weight_buffer.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::testing {
namespace {

class MoeDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    install_mini_host();
    registry_ = shim::moe_registry();
    device_ = registry_->iface.get_device(registry_, 0);
  }
  ggml_backend_buffer_t allocate(std::size_t bytes) {
    ggml_backend_buffer_type_t type = device_->iface.get_buffer_type(device_);
    return type->iface.alloc_buffer(type, bytes);
  }
  static void release(ggml_backend_buffer_t buffer) {
    buffer->iface.free_buffer(buffer);
    delete buffer;
  }
  // The question of the loader: a weight in an empty buffer, fresh ids.
  bool supports(ggml_op op, ggml_backend_buffer_t buffer, ggml_op ids_op) {
    weight_ = {};
    ids_ = {};
    ggml_tensor node = {};
    weight_.buffer = buffer;
    ids_.op = ids_op;
    node.op = op;
    node.src[op == GGML_OP_ADD_ID ? 1 : 0] = &weight_;
    node.src[2] = &ids_;
    return device_->iface.supports_op(device_, &node);
  }

  ggml_backend_reg_t registry_ = nullptr;
  ggml_backend_dev_t device_ = nullptr;
  ggml_tensor weight_ = {};
  ggml_tensor ids_ = {};
};

TEST_F(MoeDeviceTest, SaysYesToTheLoadersProbeOnly) {
  ggml_backend_buffer_t empty = allocate(0);
  ggml_backend_buffer_t real = allocate(4096);
  for (const ggml_op op : {GGML_OP_MUL_MAT_ID, GGML_OP_ADD_ID}) {
    EXPECT_TRUE(supports(op, empty, GGML_OP_NONE));
    EXPECT_FALSE(supports(op, real, GGML_OP_NONE)) << "the scheduler would cut the graph";
    EXPECT_FALSE(supports(op, empty, GGML_OP_VIEW)) << "a graph that is only measured would be cut";
    EXPECT_FALSE(supports(op, nullptr, GGML_OP_NONE));
  }
  EXPECT_FALSE(supports(GGML_OP_MUL_MAT, empty, GGML_OP_NONE));
  EXPECT_FALSE(supports(GGML_OP_GET_ROWS, empty, GGML_OP_NONE));
  release(empty);
  release(real);
}

TEST_F(MoeDeviceTest, OwnsABufferTypeThatIsNoHostMemory) {
  ggml_backend_buffer_type_t type = device_->iface.get_buffer_type(device_);
  EXPECT_STREQ(type->iface.get_name(type), "MOECACHE");
  EXPECT_EQ(type->device, device_);
  EXPECT_FALSE(type->iface.is_host(type));
  EXPECT_TRUE(device_->iface.supports_buft(device_, type));
  EXPECT_EQ(device_->iface.get_type(device_), GGML_BACKEND_DEVICE_TYPE_ACCEL);
}

TEST_F(MoeDeviceTest, ComputesNothing) {
  ggml_backend_t backend = device_->iface.init_backend(device_, nullptr);
  ggml_cgraph graph = {};
  EXPECT_EQ(backend->iface.graph_compute(backend, &graph), GGML_STATUS_FAILED);
  backend->iface.free(backend);
}

}  // namespace
}  // namespace moecached::testing
