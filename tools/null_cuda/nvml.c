/* The management library NVML, as torch asks it: it counts the devices, and knows of no fabric between them. Build it
   alone, as libnvidia-ml.so.1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NOT_SUPPORTED 3

static int devices(void) {
    const char *text = getenv("NULL_CUDA_DEVICES");
    return text ? atoi(text) : 1;
}
static int succeed(void) { return 0; }

EXPORT int nvmlInit(void) { return succeed(); }
EXPORT int nvmlInit_v2(void) { return succeed(); }
EXPORT int nvmlShutdown(void) { return succeed(); }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = devices();
    return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) {
    *device = (void *)(long)(number + 1);
    return 0;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = (void *)1;
    return 0;
}
EXPORT int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012ld", (long)device - 1);
    return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
/* The state of nvmlGpuFabricInfo_v2_t is the byte at 28; 0 means that the device has no fabric. */
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned char *info) {
    if (getenv("NULL_CUDA_NO_FABRIC_INFO")) return NOT_SUPPORTED;
    info[28] = 0;
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return 0;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
