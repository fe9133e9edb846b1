// The load: many connections to one server, in one of three dialects, closed loop.
//   load DIALECT PORT echo    CONNECTIONS SECONDS BYTES BURST
//   load DIALECT PORT fanout  CONNECTIONS SECONDS BYTES EXTRA
//   load DIALECT PORT storm   CONNECTIONS WINDOW BYTES
//   load DIALECT PORT hold    CONNECTIONS BYTES
// DIALECT frames: 4-byte length and payload; nats: the text protocol; mqtt: 3.1.1 with QoS 0.
// echo    each connection sends BURST frames in one write, waits until all are back, begins again
// fanout  connection 0 says one payload for all; when each connection has it (with EXTRA bytes behind it), again
// storm   WINDOW connections are opened at a time; each sends its first frame (behind its dialect's opening), and is done
//         when the answer came; then the next one is opened. All stay open until the end
// hold    as storm, 256 at a time; then all stay, silent
// Each prints "ready" when its connections stand (storm: before the first), waits for a line on standard input, works, and
// prints "done COUNT SECONDS"; then it waits for a line again, closes all and ends. So whoever measures looks at the
// servers' CPU time between those lines.
#include "net.h"

typedef enum { FRAMES, NATS, MQTT } Dialect;

typedef struct {
    uint64_t due;      // bytes that are still to come of this round
    uint32_t stage;    // 0 connecting, 1 opening, 2 open
    uint8_t cut[32];   // nats: a line that is not whole
    uint8_t cut_size;
    uint32_t skip;     // nats: payload bytes still to come
} Conn;

static Dialect dialect;
static int port, ep, *fds, count;
static Conn *conns;           // by fd
static int *index_of;         // by fd
static size_t bytes;

static void say(const char *words) {
    puts(words);
    fflush(stdout);
}

static void await_line(void) {
    char line[64];
    if (!fgets(line, sizeof line, stdin)) exit(0);
}

static void must_write(int fd, const void *data, size_t size) {
    ssize_t n = write(fd, data, size);
    if (n != (ssize_t)size) die("a socket took %zd of %zu bytes", n, size);
}

static size_t topic(char *out, int i, int shared) { return (size_t)sprintf(out, shared ? "fan" : "e%07d", i); }

// One message of connection i; returns its size. `letter`: what its payload begins with.
static size_t message(char *out, int i, int shared, char letter) {
    char name[16];
    size_t n = topic(name, i, shared), at = 0;
    if (dialect == FRAMES) {
        uint32_t length = htonl((uint32_t)bytes);
        memcpy(out, &length, 4);
        at = 4;
    } else if (dialect == NATS) {
        at = (size_t)sprintf(out, "PUB %s %zu\r\n", name, bytes);
    } else {
        size_t rest = 2 + n + bytes;
        out[at++] = 0x30;
        do {
            out[at++] = (char)((rest & 127) | (rest > 127 ? 128 : 0));
            rest >>= 7;
        } while (rest);
        out[at++] = 0;
        out[at++] = (char)n;
        memcpy(out + at, name, n);
        at += n;
    }
    memset(out + at, letter, bytes);
    at += bytes;
    if (dialect == NATS) {
        memcpy(out + at, "\r\n", 2);
        at += 2;
    }
    return at;
}

// What comes back for one message, bytes; nats is counted by payload instead.
static size_t answer_bytes(size_t sent) { return dialect == NATS ? bytes : sent; }

// The dialect's opening: sent as one write, answered by so many bytes (nats: by its INFO line before, and PONG).
static size_t opening(char *out, int i, int shared) {
    char name[16];
    size_t n = topic(name, i, shared);
    if (dialect == NATS)
        return (size_t)sprintf(
            out, "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"echo\":true}\r\nSUB %s 1\r\nPING\r\n", name);
    if (dialect == MQTT) {
        size_t at = 0;
        const uint8_t connect[] = {0x10, 20, 0, 4, 'M', 'Q', 'T', 'T', 4, 2, 0, 0, 0, 8};
        memcpy(out, connect, sizeof connect);
        at = sizeof connect;
        at += (size_t)sprintf(out + at, "c%07d", i);
        out[at++] = (char)0x82;
        out[at++] = (char)(2 + 2 + n + 1);
        out[at++] = 0, out[at++] = 1, out[at++] = 0, out[at++] = (char)n;
        memcpy(out + at, name, n);
        at += n;
        out[at++] = 0;
        return at;
    }
    return 0;
}

#define MQTT_OPENED 9  // CONNACK and SUBACK

// Takes what NATS said; returns the payload bytes that arrived. *opened: a PONG came.
static size_t take_nats(int fd, const uint8_t *data, size_t size, int *opened) {
    Conn *c = &conns[fd];
    size_t got = 0, at = 0;
    while (at < size) {
        if (c->skip) {
            size_t n = size - at < c->skip ? size - at : c->skip;
            size_t payload = c->skip > 2 ? c->skip - 2 : 0;
            got += n < payload ? n : payload;
            c->skip -= (uint32_t)n;
            at += n;
            continue;
        }
        const uint8_t *end = memchr(data + at, '\n', size - at);
        size_t n = end ? (size_t)(end - data) - at + 1 : size - at;
        char line[64];
        size_t keep = n;
        if (c->cut_size + keep > sizeof line - 1) keep = sizeof line - 1 - c->cut_size;  // INFO is long: its begin is enough
        memcpy(line, c->cut, c->cut_size);
        memcpy(line + c->cut_size, data + at, keep);
        size_t have = c->cut_size + keep;
        line[have] = 0;
        at += n;
        if (!end) {
            c->cut_size = (uint8_t)(have < sizeof c->cut ? have : sizeof c->cut);
            memcpy(c->cut, line, c->cut_size);
            break;
        }
        c->cut_size = 0;
        if (!strncmp(line, "MSG ", 4)) {
            char *last = strrchr(line, ' ');
            c->skip = (uint32_t)atoi(last + 1) + 2;
        } else if (!strncmp(line, "PING", 4)) {
            must_write(fd, "PONG\r\n", 6);
        } else if (!strncmp(line, "PONG", 4)) {
            *opened = 1;
        } else if (!strncmp(line, "-ERR", 4)) {
            errno = 0;
            die("nats says %s", line);
        }
    }
    return got;
}

// Reads a socket; returns how many counted bytes came. *opened: the opening is answered now.
static size_t take(int fd, int *opened) {
    static uint8_t buffer[262144];
    ssize_t r = read(fd, buffer, sizeof buffer);
    if (r < 0 && errno == EAGAIN) return 0;
    if (r <= 0) die("the server closed a connection");
    Conn *c = &conns[fd];
    if (dialect == NATS) return take_nats(fd, buffer, (size_t)r, opened);
    if (dialect == MQTT && c->stage == 1) {
        if (c->due > (uint64_t)r) {
            c->due -= (uint64_t)r;
            return 0;
        }
        *opened = 1;
        return (size_t)r - (size_t)c->due;
    }
    return (size_t)r;
}

// Opens all connections, at most `window` at a time. with_frame: each sends a first frame and waits for its answer.
static void open_all(int window, int with_frame, int shared) {
    char out[70000];
    struct epoll_event got[EVENTS];
    int begun = 0, stand = 0, under_way = 0;
    while (stand < count) {
        while (begun < count && under_way < window) {
            int fd = connecting(port);
            if (fd < 0) die("refused");
            fds[begun] = fd;
            index_of[fd] = begun++;
            conns[fd] = (Conn){0};
            under_way++;
            watch(ep, EPOLL_CTL_ADD, fd, EPOLLOUT);
        }
        int n = epoll_wait(ep, got, EVENTS, 30000);
        if (n == 0) die("no answer for 30 s, %d of %d connections stand", stand, count);
        for (int i = 0; i < n; i++) {
            int fd = got[i].data.fd, opened = 0;
            Conn *c = &conns[fd];
            size_t sent;
            if (c->stage == 0) {
                int code = 0;
                socklen_t size = sizeof code;
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size);
                if (code) {
                    errno = code;
                    die("connect");
                }
                watch(ep, EPOLL_CTL_MOD, fd, EPOLLIN);
                c->stage = 1;
                if (dialect == FRAMES)
                    opened = 1;
                else {
                    must_write(fd, out, opening(out, index_of[fd], shared));
                    c->due = MQTT_OPENED;
                    continue;
                }
            } else {
                size_t came = take(fd, &opened);
                if (c->stage == 2 && c->due) {
                    c->due -= came < c->due ? came : c->due;
                    if (c->due == 0) {
                        stand++;
                        under_way--;
                    }
                    continue;
                }
            }
            if (!opened) continue;
            c->stage = 2;
            if (with_frame) {
                sent = message(out, index_of[fd], shared, 'E');
                c->due = answer_bytes(sent);
                must_write(fd, out, sent);
            } else {
                stand++;
                under_way--;
            }
        }
    }
}

static uint64_t echo(double seconds, int burst) {
    char **outs = calloc((size_t)count, sizeof *outs), one[70000];
    size_t whole = 0, back = 0;
    for (int i = 0; i < count; i++) {
        size_t n = message(one, i, 0, 'E');
        if (i == 0 || dialect != FRAMES) {
            outs[i] = malloc(n * (size_t)burst);
            for (int k = 0; k < burst; k++) memcpy(outs[i] + n * (size_t)k, one, n);
        } else {
            outs[i] = outs[0];
        }
        whole = n * (size_t)burst;
        back = answer_bytes(n) * (size_t)burst;
    }
    struct epoll_event got[EVENTS];
    uint64_t rounds = 0;
    for (int i = 0; i < count; i++) {
        conns[fds[i]].due = back;
        must_write(fds[i], outs[i], whole);
    }
    for (double end = now_s() + seconds; now_s() < end;) {
        int n = epoll_wait(ep, got, EVENTS, 100), opened;
        for (int i = 0; i < n; i++) {
            int fd = got[i].data.fd;
            Conn *c = &conns[fd];
            c->due -= take(fd, &opened);
            if (c->due == 0) {
                rounds++;
                c->due = back;
                must_write(fd, outs[index_of[fd]], whole);
            }
        }
    }
    return rounds * (uint64_t)burst;
}

static uint64_t fan_out(double seconds, size_t extra) {
    char out[70000];
    struct epoll_event got[EVENTS];
    uint64_t delivered = 0;
    for (double end = now_s() + seconds; now_s() < end;) {
        size_t sent = message(out, 0, 1, 'F'), each = answer_bytes(sent) + extra;
        uint64_t due = (uint64_t)each * (uint64_t)count;
        must_write(fds[0], out, sent);
        while (due) {
            int n = epoll_wait(ep, got, EVENTS, 30000), opened;
            if (n == 0) die("no answer for 30 s, %llu bytes of a fan-out lack", (unsigned long long)due);
            for (int i = 0; i < n; i++) {
                size_t came = take(got[i].data.fd, &opened);
                if (came > due) die("more came than was sent");
                due -= came;
            }
        }
        delivered += (uint64_t)count;
    }
    return delivered;
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fputs("usage: load frames|nats|mqtt PORT echo|fanout|storm|hold CONNECTIONS …\n", stderr);
        return 64;
    }
    all_files();
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    dialect = !strcmp(argv[1], "nats") ? NATS : !strcmp(argv[1], "mqtt") ? MQTT : FRAMES;
    port = atoi(argv[2]);
    const char *mode = argv[3];
    count = atoi(argv[4]);
    conns = calloc(limit.rlim_cur, sizeof *conns);
    index_of = calloc(limit.rlim_cur, sizeof *index_of);
    fds = calloc((size_t)count, sizeof *fds);
    ep = epoll_create1(0);
    uint64_t done = 0;
    double began;
    if (!strcmp(mode, "echo") && argc == 8) {
        bytes = (size_t)atoi(argv[6]);
        open_all(256, 1, 0);
        say("ready");
        await_line();
        began = now_s();
        done = echo(atof(argv[5]), atoi(argv[7]));
    } else if (!strcmp(mode, "fanout") && argc == 8) {
        bytes = (size_t)atoi(argv[6]);
        // Of a shared topic a first frame would come to all; the worker's connections are known by their first frame.
        open_all(256, dialect == FRAMES, 1);
        say("ready");
        await_line();
        began = now_s();
        done = fan_out(atof(argv[5]), (size_t)atoi(argv[7]));
    } else if ((!strcmp(mode, "storm") && argc == 7) || (!strcmp(mode, "hold") && argc == 6)) {
        int storm = mode[0] == 's';
        bytes = (size_t)atoi(argv[storm ? 6 : 5]);
        if (storm) {
            say("ready");
            await_line();
        }
        began = now_s();
        open_all(storm ? atoi(argv[5]) : 256, 1, 0);
        if (!storm) say("ready");
        done = (uint64_t)count;
    } else {
        return 64;
    }
    printf("done %llu %.6f\n", (unsigned long long)done, now_s() - began);
    fflush(stdout);
    await_line();
    for (int i = 0; i < count; i++) close_by_reset(fds[i]);
    return 0;
}
