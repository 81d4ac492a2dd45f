// The three functions of libcuda that the plugin asks for a GPU's UUID.
#include <string.h>

struct uuid {
  char bytes[16];
};

int cuInit(unsigned flags) { return (int)flags; }

// GPU n is at bus n.
int cuDeviceGetByPCIBusId(int* device, const char* bus_id) {
  if (strncmp(bus_id, "0000:0", 6) != 0) return 101;
  *device = bus_id[6] - '0';
  return 0;
}

int cuDeviceGetUuid_v2(struct uuid* uuid, int device) {
  memset(uuid->bytes, 0x40 + device, sizeof uuid->bytes);
  return 0;
}
