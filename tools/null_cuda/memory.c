/* Device memory and pinned memory, and copies.

   Its sizes are those of a device. Pages that nothing touches take no RAM. */
#include "shared.h"

static Region *regions;
static int n_regions, cap_regions;
size_t device_used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
__thread cudaError_t last_error;
__thread int current_device;

size_t capacity(void) {
    const char *text = getenv("NULL_CUDA_GIB");
    return (size_t)((text ? atof(text) : 139.8) * (1ul << 30));
}
int devices(void) {
    const char *t = getenv("NULL_CUDA_DEVICES");
    return t ? atoi(t) : 1;
}
cudaError_t fail(cudaError_t e) {
    last_error = e;
    return e;
}
/* Whether this process may use CUDA: one that was forked after its parent had used it may not. */
bool usable(void) {
    static pid_t user;
    if (!user) user = getpid();
    return user == getpid();
}
FILE *trace(void) {
    static FILE *file;
    static bool opened;
    if (!opened) {
        const char *p = getenv("NULL_CUDA_TRACE");
        if (p) file = fopen(p, "a");
        opened = true;
    }
    return file;
}
void sync_point(const char *what) {
    FILE *f = trace();
    if (f) {
        fprintf(f, "sync %s\n", what);
        fflush(f);
    }
}

void add_region(void *p, size_t size, int kind) {
    pthread_mutex_lock(&lock);
    int at = -1;
    for (int i = 0; i < n_regions; i++)
        if (!regions[i].kind) {
            at = i;
            break;
        }
    if (at < 0) {
        if (n_regions == cap_regions) {
            cap_regions = cap_regions ? 2 * cap_regions : 1024;
            regions = realloc(regions, cap_regions * sizeof *regions);
        }
        at = n_regions++;
    }
    regions[at] = (Region){(uintptr_t)p, size, kind};
    if (kind == 1) device_used += size;
    pthread_mutex_unlock(&lock);
}
bool find_region(const void *p, Region *out) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_regions; i++)
        if (regions[i].kind && (uintptr_t)p >= regions[i].begin && (uintptr_t)p < regions[i].begin + regions[i].size) {
            *out = regions[i];
            found = true;
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
bool remove_region(const void *p, int kind, Region *out) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_regions; i++)
        if (regions[i].kind == kind && regions[i].begin == (uintptr_t)p) {
            *out = regions[i];
            regions[i].kind = 0;
            found = true;
            if (kind == 1) device_used -= out->size;
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
void *map(size_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* Allocations and copies. NULL_CUDA_COPY limits the bytes that a copy moves: the rest is left as it is. */
EXPORT cudaError_t cudaMalloc(void **p, size_t size) {
    *p = NULL;
    if (!usable()) return fail(cudaErrorInitializationError);
    if (!size) return 0;
    if (device_used + size > capacity()) return fail(cudaErrorMemoryAllocation);
    size_t rounded = (size + 511) & ~511ul;
    *p = map(rounded);
    if (!*p) return fail(cudaErrorMemoryAllocation);
    add_region(*p, rounded, 1);
    return 0;
}
EXPORT cudaError_t cudaFree(void *p) {
    Region r;
    if (!p) return 0;
    sync_point("cudaFree");
    if (!remove_region(p, 1, &r)) return fail(cudaErrorInvalidValue);
    munmap((void *)r.begin, r.size);
    return 0;
}
EXPORT cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return cudaMalloc(p, size); }
EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
EXPORT cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) {

    const char *limit = getenv("NULL_CUDA_NO_PINNING");
    if (limit) return fail(cudaErrorMemoryAllocation);
    *p = map(size ? size : 1);
    add_region(*p, size ? size : 1, 2);
    return 0;
}
EXPORT cudaError_t cudaFreeHost(void *p) {
    Region r;
    if (p && remove_region(p, 2, &r)) munmap((void *)r.begin, r.size);
    return 0;
}
EXPORT cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) {

    if (getenv("NULL_CUDA_NO_PINNING")) return fail(cudaErrorMemoryAllocation);
    Region r;
    if (find_region(p, &r)) return fail(cudaErrorHostMemoryAlreadyRegistered);
    add_region(p, size, 2);
    return 0;
}
EXPORT cudaError_t cudaHostUnregister(void *p) {
    Region r;
    return remove_region(p, 2, &r) ? 0 : fail(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    Region r;
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    if (find_region(p, &r)) {
        a->type = r.kind == 1 ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        a->device = 0;
        a->devicePointer = (void *)p;
        a->hostPointer = r.kind == 1 ? NULL : (void *)p;
    }
    return 0;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
    *total = capacity();
    size_t used = device_used + (500ul << 20);
    *free_ = used > *total ? 0 : *total - used;
    return 0;
}
size_t copy_limit(void) {
    static size_t v;
    static bool read;
    if (!read) {
        const char *t = getenv("NULL_CUDA_COPY");
        v = t ? strtoull(t, NULL, 10) : SIZE_MAX;
        read = true;
    }
    return v;
}
static void copy(void *d, const void *s, size_t n) { memmove(d, s, n < copy_limit() ? n : copy_limit()); }
static void check_pageable(const char *name, const void *a, const void *b, enum cudaMemcpyKind kind) {
    Region r;
    FILE *f = trace();
    if (!f) return;
    const void *host = NULL;
    bool da = find_region(a, &r) && r.kind == 1, db = find_region(b, &r) && r.kind == 1;
    if (da && db) return;
    host = da ? b : a;
    bool pinned = find_region(host, &r) && r.kind == 2;
    fprintf(f, "copy %s %s %s %d\n", name,
            da   ? "to_device"
            : db ? "to_host"
                 : "host",
            pinned ? "pinned" : "pageable", kind);
    fflush(f);
}
EXPORT cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    check_pageable("sync", d, s, k);
    copy(d, s, n);
    return 0;
}
EXPORT cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) {
    check_pageable("async", d, s, k);
    copy(d, s, n);
    return 0;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t st) {
    copy(d, s, n);
    return 0;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                                     enum cudaMemcpyKind k, cudaStream_t st) {

    for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, w);
    return 0;
}
EXPORT cudaError_t cudaMemset(void *p, int v, size_t n) {
    memset(p, v, n < copy_limit() ? n : copy_limit());
    return 0;
}
EXPORT cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { return cudaMemset(p, v, n); }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
    memset(v, 0, 8);
    return 0;
}
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) {
    return fail(cudaErrorNotSupported);
}
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
    return fail(cudaErrorNotSupported);
}

