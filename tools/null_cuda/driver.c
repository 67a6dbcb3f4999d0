/* The driver: virtual memory (expandable segments) and modules, as torch and Triton use them. */
#include "shared.h"

EXPORT CUresult cuDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
EXPORT CUresult cuDeviceGet(CUdevice *d, int n) {
    *d = n;
    return 0;
}
EXPORT CUresult cuDeviceGetCount(int *n) {
    *n = devices();
    return 0;
}
EXPORT CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
    *v = attribute((int)a);
    return 0;
}
EXPORT CUresult cuDeviceGetName(char *n, int l, CUdevice d) {
    snprintf(n, l, "NVIDIA H200 (null)");
    return 0;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) {
    *c = (CUcontext)0x10;
    return 0;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *d) {
    *d = current_device;
    return 0;
}
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *c) {
    *c = (CUcontext)0x10;
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
    *c = (CUcontext)0x10;
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) {
    *f = 0;
    *a = 1;
    return 0;
}
EXPORT CUresult cuGetErrorString(CUresult e, const char **s) {
    *s = "an error of the null device";
    return 0;
}
EXPORT CUresult cuGetErrorName(CUresult e, const char **s) {
    *s = "CUDA_ERROR_NULL";
    return 0;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t al, CUdeviceptr a, unsigned long long f) {

    void *q = mmap(NULL, size + GRANULE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (q == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = ((uintptr_t)q + GRANULE - 1) & ~(GRANULE - 1);
    return 0;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t s) {
    munmap((void *)p, s);
    return 0;
}
typedef struct {
    size_t size;
} Handle;
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t s, const CUmemAllocationProp *p,
                            unsigned long long f) {

    if (device_used + s > capacity()) return CUDA_ERROR_OUT_OF_MEMORY;
    Handle *x = malloc(sizeof *x);
    x->size = s;
    *h = (uintptr_t)x;
    __sync_fetch_and_add(&device_used, s);
    return 0;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
    __sync_fetch_and_sub(&device_used, ((Handle *)h)->size);
    free((void *)h);
    return 0;
}
EXPORT CUresult cuMemMap(CUdeviceptr p, size_t s, size_t o, CUmemGenericAllocationHandle h, unsigned long long f) {
    add_region((void *)p, s, 1);
    __sync_fetch_and_sub(&device_used, s);
    return 0;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t s) {
    for (size_t at = 0; at < s;) {
        Region r;
        if (!remove_region((void *)(p + at), 1, &r)) break;
        __sync_fetch_and_add(&device_used, r.size);
        at += r.size;
    }
    madvise((void *)p, s, MADV_DONTNEED);
    return 0;
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p,
                                              CUmemAllocationGranularity_flags o) {
    *g = GRANULE;
    return 0;
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) {
    for (size_t i = 0; i < n; i++) ((unsigned *)p)[i] = v;
    return 0;
}
EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *d) {
    *m = (CUmodule)calloc(1, 8);
    return 0;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *m, const void *d, unsigned n, CUjit_option *o, void **v) {
    return cuModuleLoadData(m, d);
}
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
    *f = (CUfunction)strdup(n);
    return 0;
}
EXPORT CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
    *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return 0;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
    *n = 1;
    return 0;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t s) {
    *n = 2;
    return 0;
}
EXPORT CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
    Region r;
    bool found = find_region((void *)p, &r);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)v = p;
    else
        *(int *)v = 0;
    return 0;
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned f) {
    *(cuuint32_t *)p = v;
    return 0;
}
static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long fl,
                                                    enum cudaDriverEntryPointQueryResult *st) {

    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *f = dlsym(RTLD_DEFAULT, versioned);
    if (!*f) *f = dlsym(RTLD_DEFAULT, name);
    if (!*f) *f = (void *)unsupported;
    if (st) *st = cudaDriverEntryPointSuccess;
    return 0;
}
EXPORT CUresult cuCtxGetLimit(size_t *v, CUlimit l) {
    *v = 1 << 20;
    return 0;
}
EXPORT CUresult cuModuleLoad(CUmodule *m, const char *p) {
    *m = (CUmodule)calloc(1, 8);
    return 0;
}
EXPORT CUresult cuModuleLoadFatBinary(CUmodule *m, const void *p) {
    *m = (CUmodule)calloc(1, 8);
    return 0;
}
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *n, CUmodule m, const char *s) {
    static char area[1 << 16];
    *p = (CUdeviceptr)area;
    if (n) *n = 8;
    return 0;
}
