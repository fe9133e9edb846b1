// What all programs of the benchmarks share: loopback addresses, sockets, the clock. Errors end the program in words.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 1024

static inline void die(const char *what, ...) {
    int code = errno;
    va_list list;
    va_start(list, what);
    vfprintf(stderr, what, list);
    va_end(list);
    if (code) fprintf(stderr, " (%s)", strerror(code));
    fputc('\n', stderr);
    exit(1);
}

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void all_files(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static inline void nodelay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// A close by reset leaves no TIME_WAIT, so that storms do not run out of ports.
static inline void close_by_reset(int fd) {
    struct linger linger = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    close(fd);
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

// A non-blocking socket whose connect is done or under way; -1: refused at once.
static inline int connecting(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) die("no socket");
    nodelay(fd);
    struct sockaddr_in a = loopback(port);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    return fd;
}

static inline void watch(int ep, int op, int fd, uint32_t events) {
    struct epoll_event e = {.events = events, .data.fd = fd};
    if (epoll_ctl(ep, op, fd, &e)) die("epoll_ctl of %d", fd);
}

static inline uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

// Memory of at least `size` bytes, growing by doubling.
static inline void *grown(void *memory, size_t *have, size_t size) {
    if (size <= *have) return memory;
    while (*have < size) *have = *have ? 2 * *have : 4096;
    memory = realloc(memory, *have);
    if (!memory) die("no memory for %zu bytes", *have);
    return memory;
}
