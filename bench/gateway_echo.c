// The yardstick of bench/gateway_echo.py: a plain epoll echo server, and the load that both servers get.
//   gateway_echo serve                                 prints its port, echoes until killed
//   gateway_echo load PORT CONNECTIONS SECONDS BYTES BURST   prints how many frames came back
// A frame is a 4-byte big-endian length and BYTES of payload. Each connection sends BURST frames in one write, waits for
// as many bytes, and begins again.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 512

static int nodelay(int fd) {
    int one = 1;
    return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

static int serve(void) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), ep = epoll_create1(0);
    struct sockaddr_in a = loopback(0);
    socklen_t size = sizeof a;
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 1024)) return 1;
    getsockname(listener, (struct sockaddr *)&a, &size);
    printf("%d\n", ntohs(a.sin_port));
    fflush(stdout);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, got[EVENTS];
    epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
    char buffer[16384];
    for (;;) {
        int n = epoll_wait(ep, got, EVENTS, 200);
        for (int i = 0; i < n; i++) {
            int fd = got[i].data.fd;
            if (fd == listener) {
                int c = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (c < 0) continue;
                nodelay(c);
                e.events = EPOLLIN;
                e.data.fd = c;
                epoll_ctl(ep, EPOLL_CTL_ADD, c, &e);
                continue;
            }
            ssize_t r = read(fd, buffer, sizeof buffer);
            if (r <= 0) {
                if (r == 0 || errno != EAGAIN) close(fd);
                continue;
            }
            if (write(fd, buffer, (size_t)r) != r) close(fd);
        }
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int load(int port, int connections, double seconds, int bytes, int burst) {
    size_t frame = 4 + (size_t)bytes, whole = frame * (size_t)burst;
    char *out = malloc(whole), buffer[65536];
    for (int i = 0; i < burst; i++) {
        uint32_t length = htonl((uint32_t)bytes);
        memcpy(out + frame * (size_t)i, &length, 4);
        memset(out + frame * (size_t)i + 4, 'x', (size_t)bytes);
    }
    int ep = epoll_create1(0);
    size_t *due = calloc(65536, sizeof *due);
    struct epoll_event e = {.events = EPOLLIN}, got[EVENTS];
    struct sockaddr_in a = loopback(port);
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a)) return 1;
        nodelay(fd);
        fcntl(fd, F_SETFL, O_NONBLOCK);
        e.data.fd = fd;
        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
        due[fd] = whole;
        if (write(fd, out, whole) != (ssize_t)whole) return 1;
    }
    uint64_t rounds = 0;
    for (double end = now() + seconds; now() < end;) {
        int n = epoll_wait(ep, got, EVENTS, 100);
        for (int i = 0; i < n; i++) {
            int fd = got[i].data.fd;
            ssize_t r = read(fd, buffer, sizeof buffer);
            if (r <= 0) return 2;
            due[fd] -= (size_t)r;
            if (due[fd] == 0) {
                rounds++;
                due[fd] = whole;
                if (write(fd, out, whole) != (ssize_t)whole) return 1;
            }
        }
    }
    printf("%llu\n", (unsigned long long)rounds * (unsigned long long)burst);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "serve")) return serve();
    if (argc == 7 && !strcmp(argv[1], "load"))
        return load(atoi(argv[2]), atoi(argv[3]), atof(argv[4]), atoi(argv[5]), atoi(argv[6]));
    fprintf(stderr, "usage: gateway_echo serve | load PORT CONNECTIONS SECONDS BYTES BURST\n");
    return 64;
}
