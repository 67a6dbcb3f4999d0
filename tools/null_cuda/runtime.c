/* A CUDA runtime and driver without a device.

   Memory is host memory, work has ended when a call returns, kernels do nothing. A function that only has to succeed is not here:
   build.py generates it. */
#include "shared.h"

/* Devices: the figures of an H200, so that programs choose what they choose there. */
EXPORT cudaError_t cudaGetDeviceCount(int *n) {
    *n = 0;
    if (!usable()) return fail(cudaErrorInitializationError);
    *n = devices();
    return *n ? 0 : fail(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int *d) {
    *d = current_device;
    return 0;
}
EXPORT cudaError_t cudaSetDevice(int d) {
    if (!usable()) return fail(cudaErrorInitializationError);
    if (d < 0 || d >= devices()) return fail(cudaErrorInvalidDevice);
    current_device = d;
    return 0;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (!usable()) return fail(cudaErrorInitializationError);
    if (d < 0 || d >= devices()) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H200 (null)");
    p->totalGlobalMem = capacity();
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = 1024;
    p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 62914560;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlockOptin = 232448;
    p->unifiedAddressing = 1;
    p->managedMemory = 1;
    p->canMapHostMemory = 1;
    p->concurrentKernels = 1;
    p->asyncEngineCount = 3;
    p->cooperativeLaunch = 1;
    p->pciBusID = 1;
    p->textureAlignment = 512;
    p->streamPrioritiesSupported = 1;
    p->memoryBusWidth = 6144;
    p->maxBlocksPerMultiProcessor = 32;
    p->reservedSharedMemPerBlock = 1024;
    return 0;
}
int attribute(int a) {
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return 62914560;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess: return 1;
    case cudaDevAttrHostRegisterSupported: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    default: return 0;
    }
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    *v = attribute(a);
    return 0;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) {
    *v = a != b;
    return 0;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
    *p = (cudaMemPool_t)(uintptr_t)(0x100 + d);
    return 0;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *b, int n, int d) {
    snprintf(b, n, "0000:%02x:00.0", d + 1);
    return 0;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) {
    if (l) *l = 0;
    if (g) *g = -5;
    return 0;
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
    sync_point("device");
    return 0;
}
EXPORT cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t e = last_error;
    last_error = 0;
    return e;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorName(cudaError_t e) {
    return e == 0 ? "cudaSuccess" : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorNull";
}
EXPORT const char *cudaGetErrorString(cudaError_t e) {
    return e == 0                           ? "no error"
           : e == cudaErrorMemoryAllocation ? "out of memory"
           : e == cudaErrorInvalidDevice    ? "invalid device ordinal"
                                            : "an error of the null device";
}

/* Streams, events and graphs: all work has ended when a call returns. Events have the time of the host. */
typedef struct {
    int priority;
    int capture;
    unsigned long long id;
} Stream;
typedef struct {
    struct timespec at;
} Event;
static Stream null_stream;
static unsigned long long captures;
static Stream *stream_of(cudaStream_t s) { return (uintptr_t)s <= 2 ? &null_stream : (Stream *)s; }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = calloc(1, sizeof(Stream));
    return 0;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreate(s); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    cudaStreamCreate(s);
    ((Stream *)*s)->priority = p;
    return 0;
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t s) {
    if ((uintptr_t)s > 2) free(s);
    return 0;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = stream_of(s)->priority;
    return 0;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    if (stream_of(s)->capture) return fail(cudaErrorStreamCaptureUnsupported);
    sync_point("stream");
    return 0;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void *d, unsigned f) {
    c(s, 0, d);
    return 0;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t c, void *d) {
    c(d);
    return 0;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
    Stream *x = stream_of(s);
    x->capture = 1;
    x->id = ++captures;
    return 0;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    stream_of(s)->capture = 0;
    *g = calloc(1, 8);
    return 0;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *o) {
    *o = stream_of(s)->capture;
    return 0;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *o, unsigned long long *id,
                                            cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                            size_t *n) {
    *o = stream_of(s)->capture;
    if (id) *id = stream_of(s)->id;
    if (g) *g = NULL;
    if (d) *d = NULL;
    if (e) *e = NULL;
    if (n) *n = 0;
    return 0;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    free(g);
    return 0;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) {
    free(g);
    return 0;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) {
    *n = 1;
    return 0;
}
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t n, cudaGraphNode_t *d, cudaGraphEdgeData *e,
                                                size_t *c) {
    *c = 0;
    return 0;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
    *e = calloc(1, 8);
    return 0;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    *e = calloc(1, sizeof(Event));
    return 0;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) {
    free(e);
    return 0;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->at);
    return 0;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    sync_point("event");
    return 0;
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    struct timespec x = ((Event *)a)->at, y = ((Event *)b)->at;
    *ms = (y.tv_sec - x.tv_sec) * 1e3f + (y.tv_nsec - x.tv_nsec) / 1e6f;
    return 0;
}

/* Kernels of the runtime: a launch does nothing. */
typedef struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} Configuration;
static __thread Configuration stack[8];
static __thread int depth;
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st *st) {
    stack[depth++ & 7] = (Configuration){g, b, s, st};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) {
    Configuration c = stack[--depth & 7];
    *g = c.grid;
    *b = c.block;
    *s = c.shared;
    *(cudaStream_t *)st = c.stream;
    return 0;
}
EXPORT void **__cudaRegisterFatBinary(void *p) { return calloc(1, 8); }
EXPORT char __cudaInitModule(void **p) { return 1; }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *e) {
    *k = (cudaKernel_t)e;
    return 0;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = 90;
    a->maxDynamicSharedSizeBytes = 49152;
    return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s,
                                                                          unsigned fl) {
    *n = 2;
    return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, b, s, 0);
}
EXPORT cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
    static char *area;
    if (!area) {
        void *q;
        cudaMalloc(&q, 1 << 20);
        area = q;
    }
    *p = area;
    return 0;
}

