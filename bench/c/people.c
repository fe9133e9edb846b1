// People who talk: thousands of clients of docs/protocol.md in one process, so that they are not the limit.
//   people GATEWAY_PORT,… IPCONFIG_PORT FILE
// The ports are the list that each has from before, the first one is where all come in.
// FILE has a line per person: token, user to talk to, conversation_id. Person 2k and person 2k + 1 talk to each other.
// It obeys lines on standard input, and answers each with one line:
//   enter                       connects everybody to the first port by Login and Sync             → ready PEOPLE SECONDS
//   talk SECONDS RATE BYTES     RATE 0: each has one message on its way all the time; else RATE a second in all
//                               → done PUSHES SECONDS and then, in ms, p50 and p99 from UP to the other's PUSH, p50 and p99 to the ACK, and repeats
//   fall SECONDS                waits until a connection breaks, lets those who fell come back as a client does: a random part of the told delay, the list of
//                               ipconfig, its gateways in turn, ReConn, Sync                     → waiting, then back FELL SECONDS, in ms p50 p99 max of ipconfig, refused, gave up
//                               who has no answer of ipconfig after 2 s goes by the list from before
// Sent frames are those of a careful client: a push or receipt is acknowledged once per read; a heartbeat goes out in time.
#include "net.h"

enum { LOGIN, HEARTBEAT, RECONN, ACK, UP, PUSH, SYNC, NOTIFY = 10, RECEIPT = 11, KICK = 14, ERROR = 16 };
#define LIST_WITHIN_S 2.0
typedef enum { AWAY, ASKING, READING_LIST, CONNECTING, ENTERING, SYNCING, LIVE } Stage;

typedef struct {
    char *token, *peer, *conversation;
    Stage stage;
    int fd, again;           // again: 1 it has a session to resume
    double due, asked, beat; // due: when what waits is to be done (0: nothing)
    uint64_t device, conn, run, push_no;
    uint8_t secret[64];
    size_t secret_size;
    uint8_t *in;
    size_t in_have, in_size;
    // the one message on its way
    uint64_t client_id;
    uint8_t key[16];
    double sent;
    int waits, acked, failures;
    int ports[8], port_count, port_at;
} Person;

static Person *people;
static int count, ep, *person_of, ipconfig, kept[8], kept_count;
static double heartbeat_s = 30, delay_s = 1;
static int live, body_bytes = 100, fell, refused, gave_up, talking;
static uint64_t pushes, repeats, chance = 88172645463325252ull;
static double rate, next_send;
static int turn;

typedef struct {
    double *at;
    size_t have, size;
} Times;
static Times to_push, to_ack, lists;

static void note(Times *t, double seconds) {
    t->at = grown(t->at, &t->have, (t->size + 1) * sizeof *t->at);
    t->at[t->size++] = seconds;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile_ms(Times *t, double q) {
    if (!t->size) return 0;
    qsort(t->at, t->size, sizeof *t->at, by_value);
    size_t i = (size_t)(q * (double)t->size);
    return 1e3 * t->at[i < t->size ? i : t->size - 1];
}

static uint64_t drawn(void) {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance;
}

static double part(void) { return (double)(drawn() >> 11) / 9007199254740992.0; }

// ── protobuf ────────────────────────────────────────────────────────────────────────────────────────────────

typedef struct {
    uint8_t at[16384];
    size_t size;
} Out;

static void varint(Out *o, uint64_t v) {
    for (; v > 127; v >>= 7) o->at[o->size++] = (uint8_t)(v | 128);
    o->at[o->size++] = (uint8_t)v;
}

static void number(Out *o, int field, uint64_t v) {
    if (v) {
        varint(o, (uint64_t)field << 3);
        varint(o, v);
    }
}

static void text(Out *o, int field, const void *data, size_t size) {
    varint(o, (uint64_t)field << 3 | 2);
    varint(o, size);
    memcpy(o->at + o->size, data, size);
    o->size += size;
}

typedef struct {
    const uint8_t *at, *end;
    int field;
    uint64_t value;       // of a varint
    const uint8_t *data;  // of bytes
    size_t size;
} In;

static uint64_t read_varint(In *in) {
    uint64_t v = 0;
    for (int shift = 0; in->at < in->end; shift += 7) {
        uint8_t b = *in->at++;
        v |= (uint64_t)(b & 127) << shift;
        if (b < 128) break;
    }
    return v;
}

static int next(In *in) {
    if (in->at >= in->end) return 0;
    uint64_t tag = read_varint(in);
    in->field = (int)(tag >> 3);
    if ((tag & 7) == 0)
        in->value = read_varint(in);
    else if ((tag & 7) == 2) {
        in->size = read_varint(in);
        in->data = in->at;
        in->at += in->size;
    } else
        die("a frame with wire type %d", (int)(tag & 7));
    return 1;
}

// ── what a person says ──────────────────────────────────────────────────────────────────────────────────────

static void fall(Person *p);

static void say(Person *p, int type, const Out *body) {
    Out cmd = {.size = 4};
    number(&cmd, 1, (uint64_t)type);
    text(&cmd, 2, body->at, body->size);
    uint32_t length = htonl((uint32_t)(cmd.size - 4));
    memcpy(cmd.at, &length, 4);
    ssize_t n = write(p->fd, cmd.at, cmd.size);
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) {
        fall(p);
        return;
    }
    if (n != (ssize_t)cmd.size) die("a socket took %zd of %zu bytes", n, cmd.size);
    p->beat = now_s() + heartbeat_s * (0.9 + 0.1 * part());
}

static void enter(Person *p) {
    Out body = {0}, inner = {0};
    p->stage = ENTERING;
    if (p->again) {
        number(&inner, 1, p->conn);
        text(&body, 1, inner.at, inner.size);
        text(&body, 3, p->secret, p->secret_size);
    } else {
        number(&inner, 1, p->device);
        text(&body, 1, inner.at, inner.size);
        text(&body, 3, p->token, strlen(p->token));
    }
    say(p, p->again ? RECONN : LOGIN, &body);
}

static void commit(Person *p) {
    Out body = {0};
    p->stage = SYNCING;
    number(&body, 1, 1);
    say(p, SYNC, &body);
}

static void up(Person *p) {
    static char filler[8192];
    Out body = {0}, inner = {0};
    number(&inner, 1, p->client_id);
    text(&inner, 3, p->conversation, strlen(p->conversation));
    text(&body, 1, inner.at, inner.size);
    memcpy(filler, &p->sent, 8);
    text(&body, 2, filler, (size_t)body_bytes);
    number(&body, 3, p->client_id - 1);
    text(&body, 4, p->key, 16);
    text(&body, 5, p->peer, strlen(p->peer));
    say(p, UP, &body);
    p->due = now_s() + 10;
}

static void begin_message(Person *p) {
    p->client_id++;
    for (int i = 0; i < 2; i++) {
        uint64_t r = drawn();
        memcpy(p->key + 8 * i, &r, 8);
    }
    p->sent = now_s();
    p->waits = 1;
    p->acked = 0;
    up(p);
}

static void beat(Person *p) {
    Out body = {0}, head = {0};
    text(&body, 1, head.at, 0);
    number(&body, 3, p->run);
    number(&body, 4, p->push_no);
    say(p, HEARTBEAT, &body);
}

static void acknowledge(Person *p) {
    Out body = {0};
    number(&body, 3, PUSH);
    number(&body, 12, p->run);
    number(&body, 13, p->push_no);
    say(p, ACK, &body);
}

// ── coming and going ────────────────────────────────────────────────────────────────────────────────────────

static void open_to(Person *p, int port, Stage stage) {
    p->fd = connecting(port);
    p->in_size = 0;
    p->stage = stage;
    if (p->fd < 0) {
        fall(p);
        return;
    }
    person_of[p->fd] = (int)(p - people);
    watch(ep, EPOLL_CTL_ADD, p->fd, EPOLLOUT);
}

// A connection is done; what comes next follows from where the person stood.
static void fall(Person *p) {
    Stage was = p->stage;
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
    p->stage = AWAY;
    if (was == LIVE) {
        live--;
        fell++;
        p->failures = 0;
        p->port_at = p->port_count = 0;
        p->due = now_s() + delay_s * part();
        return;
    }
    if ((was == CONNECTING || was == ENTERING || was == SYNCING) && ++p->port_at < p->port_count) {
        p->due = now_s();  // the next gateway at once
        return;
    }
    p->port_at = p->port_count = 0;
    double back_off = 0.25 * (double)(1 << (p->failures < 4 ? p->failures : 4));
    p->failures++;
    p->due = now_s() + back_off * (0.75 + 0.25 * part());
}

static void ask_list(Person *p) {
    p->asked = now_s();
    open_to(p, ipconfig, ASKING);
}

static void take_list(Person *p) {
    p->in[p->in_size] = 0;
    char *text_ = (char *)p->in;
    int ok = !strncmp(text_, "HTTP/1.1 200", 12);
    note(&lists, now_s() - p->asked);
    close(p->fd);
    p->fd = -1;
    p->stage = AWAY;
    p->port_count = p->port_at = 0;
    if (!ok) {
        refused++;
        fall(p);
        return;
    }
    for (char *at = strstr(text_, "\"port\":"); at && p->port_count < 8; at = strstr(at + 7, "\"port\":"))
        p->ports[p->port_count++] = atoi(at + 7);
    if (!p->port_count) {
        fall(p);
        return;
    }
    p->due = now_s();
}

// ipconfig is silent: the list from before.
static void give_up(Person *p) {
    note(&lists, now_s() - p->asked);
    gave_up++;
    close(p->fd);
    p->fd = -1;
    p->stage = AWAY;
    memcpy(p->ports, kept, sizeof kept);
    p->port_count = kept_count;
    p->port_at = 0;
    p->due = now_s();
}

static void act(Person *p) {  // its time has come
    p->due = 0;
    switch (p->stage) {
    case AWAY:
        if (p->port_at < p->port_count) open_to(p, p->ports[p->port_at], CONNECTING);
        else if (p->again) ask_list(p);
        else open_to(p, kept[0], CONNECTING);
        break;
    case ENTERING: enter(p); break;
    case SYNCING: commit(p); break;
    case LIVE:
        if (p->waits) {
            repeats++;
            up(p);
        }
        break;
    default: break;
    }
}

// ── what a person hears ─────────────────────────────────────────────────────────────────────────────────────

static void committed(Person *p) {
    p->stage = LIVE;
    p->again = 1;
    p->failures = 0;
    live++;
    p->due = 0;
    if (p->waits) up(p);
}

static void hear_ack(Person *p, In in) {
    uint64_t code = 0, type = 0, conn = 0, retry_ms = 0, delay_ms = 0, heartbeat_ms = 0;
    const uint8_t *secret = NULL, *key = NULL;
    size_t secret_size = 0;
    while (next(&in)) {
        if (in.field == 1) code = in.value;
        else if (in.field == 3) type = in.value;
        else if (in.field == 4) conn = in.value;
        else if (in.field == 10 && in.size == 16) key = in.data;
        else if (in.field == 14) secret = in.data, secret_size = in.size;
        else if (in.field == 15) heartbeat_ms = in.value;
        else if (in.field == 17) delay_ms = in.value;
        else if (in.field == 26) retry_ms = in.value;
        else if (type == SYNC && in.field == 12) p->run = in.value;
        else if (type == SYNC && in.field == 13) p->push_no = in.value;
    }
    if (type == UP) {
        if (!key || memcmp(key, p->key, 16) || !p->waits || code == 2) return;
        if (code >= 100) {
            if (code >= 400) die("a message was refused with %d", (int)code);
            p->due = now_s() + (retry_ms ? (double)retry_ms / 1e3 * (1 + part() / 4) : 0.25);
            return;
        }
        if (!p->acked && talking) note(&to_ack, now_s() - p->sent);
        p->acked = 1;
        return;
    }
    if (code == 2 || (type != LOGIN && type != RECONN && type != SYNC)) return;
    if (p->stage != ENTERING && p->stage != SYNCING) return;
    if (code >= 400) die("a login was refused with %d", (int)code);
    if (code >= 300) {
        p->again = 0;
        enter(p);
    } else if (code >= 200) {
        fall(p);
    } else if (code >= 100) {
        if (code == 101) p->stage = ENTERING;
        refused++;
        p->due = now_s() + (retry_ms ? (double)retry_ms / 1e3 : 0.25 * (0.75 + 0.25 * part()));
    } else if (type == SYNC) {
        committed(p);
    } else {
        p->conn = conn;
        if (secret && secret_size <= sizeof p->secret) {
            memcpy(p->secret, secret, secret_size);
            p->secret_size = secret_size;
        }
        if (heartbeat_ms) heartbeat_s = (double)heartbeat_ms / 1e3;
        if (delay_ms) delay_s = (double)delay_ms / 1e3;
        commit(p);
    }
}

static void hear_push(In in, double now) {
    double sent;
    while (next(&in))
        if (in.field == 3 && in.size >= 8) {
            memcpy(&sent, in.data, 8);
            if (talking) {
                pushes++;
                note(&to_push, now - sent);
            }
        }
}

static void hear_receipt(Person *p, In in) {
    uint64_t code = 0;
    const uint8_t *key = NULL;
    while (next(&in)) {
        if (in.field == 1) code = in.value;
        if (in.field == 4 && in.size == 16) key = in.data;
    }
    if (!p->waits || !key || memcmp(key, p->key, 16)) return;
    if (code >= 100) die("a receipt with %d", (int)code);
    p->waits = 0;
    p->due = 0;
    if (talking && rate == 0) begin_message(p);
}

static void hear_error(Person *p, In in) {
    uint64_t code = 0;
    while (next(&in))
        if (in.field == 1) code = in.value;
    if (code >= 400) die("an ERROR or KICK with %d", (int)code);
    refused++;
    if (code >= 300) {
        if (p->stage == LIVE) live--;
        p->again = 0;
        enter(p);
    } else if (code >= 200) {
        fall(p);
    }
}

// Returns 0 when the person has no such connection any more.
static int hear(Person *p, const uint8_t *data, size_t size, double now) {
    int fd = p->fd, type = 0;
    uint64_t run = 0, push_no = 0;
    In in = {.at = data, .end = data + size}, body = {0};
    while (next(&in)) {
        if (in.field == 1) type = (int)in.value;
        else if (in.field == 2) body = (In){.at = in.data, .end = in.data + in.size};
        else if (in.field == 3) run = in.value;
        else if (in.field == 4) push_no = in.value;
    }
    if (run > p->run || (run == p->run && push_no > p->push_no)) p->run = run, p->push_no = push_no;
    if (type == ACK) hear_ack(p, body);
    else if (type == PUSH) hear_push(body, now);
    else if (type == RECEIPT) hear_receipt(p, body);
    else if (type == ERROR || type == KICK) hear_error(p, body);
    return p->fd == fd;
}

static void ready(Person *p, uint32_t events) {
    if (p->stage == ASKING || p->stage == CONNECTING) {
        int code = 0;
        socklen_t size = sizeof code;
        getsockopt(p->fd, SOL_SOCKET, SO_ERROR, &code, &size);
        if (code) {
            fall(p);
            return;
        }
        watch(ep, EPOLL_CTL_MOD, p->fd, EPOLLIN);
        if (p->stage == CONNECTING) {
            enter(p);
            return;
        }
        char request[4096];
        int n = snprintf(request, sizeof request,
                         "GET /ip/list HTTP/1.1\r\nHost: ipconfig\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n", p->token);
        p->stage = READING_LIST;
        if (write(p->fd, request, (size_t)n) != n) fall(p);
        return;
    }
    (void)events;
    p->in = grown(p->in, &p->in_have, p->in_size + 65537);
    ssize_t r = read(p->fd, p->in + p->in_size, 65536);
    if (r < 0 && errno == EAGAIN) return;
    if (r <= 0) {
        if (p->stage == READING_LIST) take_list(p);
        else fall(p);
        return;
    }
    p->in_size += (size_t)r;
    if (p->stage == READING_LIST) return;
    size_t at = 0;
    uint64_t run = p->run, push_no = p->push_no;
    double now = now_s();
    while (p->in_size - at >= 4) {
        uint32_t length = big_endian(p->in + at);
        if (p->in_size - at < 4 + (size_t)length) break;
        if (!hear(p, p->in + at + 4, length, now)) return;
        at += 4 + length;
    }
    memmove(p->in, p->in + at, p->in_size - at);
    p->in_size -= at;
    if (p->stage == LIVE && p->push_no && (p->run != run || p->push_no != push_no)) acknowledge(p);
}

// One round: what is due, what came. At most wait_ms.
static void turn_once(int wait_ms) {
    static double looked;
    struct epoll_event got[EVENTS];
    int n = epoll_wait(ep, got, EVENTS, wait_ms);
    for (int i = 0; i < n; i++) {
        Person *p = &people[person_of[got[i].data.fd]];
        if (p->fd == got[i].data.fd) ready(p, got[i].events);
    }
    double now = now_s();
    if (now - looked < 0.01) return;
    looked = now;
    for (int i = 0; i < count; i++) {
        Person *p = &people[i];
        if (p->due && p->due <= now) act(p);
        if ((p->stage == ASKING || p->stage == READING_LIST) && now - p->asked > LIST_WITHIN_S) give_up(p);
        if (p->stage == LIVE && p->beat <= now) beat(p);
    }
}

static void read_people(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) die("no %s", path);
    size_t have = 0;
    char line[4096], token[2048], peer[128], conversation[128];
    FILE *noise = fopen("/dev/urandom", "rb");
    if (!noise || fread(&chance, 8, 1, noise) != 1) die("no random numbers");
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%2047s %127s %127s", token, peer, conversation) != 3) die("a line without three words");
        people = grown(people, &have, (size_t)(count + 1) * sizeof *people);
        people[count++] = (Person){.token = strdup(token), .peer = strdup(peer), .conversation = strdup(conversation), .fd = -1,
                                   .device = drawn() >> 1 | 1};
    }
    fclose(file);
    fclose(noise);
}

static void talk(double seconds, double per_s, int bytes) {
    rate = per_s;
    body_bytes = bytes < 8 ? 8 : bytes;
    pushes = repeats = 0;
    to_push.size = to_ack.size = 0;
    talking = 1;
    double began = now_s(), end = began + seconds;
    next_send = began;
    if (rate == 0)
        for (int i = 0; i < count; i++)
            if (people[i].stage == LIVE && !people[i].waits) begin_message(&people[i]);
    while (now_s() < end) {
        turn_once(rate ? 1 : 20);
        for (int tried = 0; rate && next_send <= now_s() && tried < count; tried++) {
            Person *p = &people[turn = (turn + 1) % count];
            if (p->stage != LIVE || p->waits) continue;
            begin_message(p);
            next_send += 1 / rate;
        }
    }
    double took = now_s() - began;
    talking = 0;
    printf("done %llu %.6f %.3f %.3f %.3f %.3f %llu\n", (unsigned long long)pushes, took, quantile_ms(&to_push, 0.5),
           quantile_ms(&to_push, 0.99), quantile_ms(&to_ack, 0.5), quantile_ms(&to_ack, 0.99), (unsigned long long)repeats);
    for (double until = now_s() + 10; now_s() < until;) {  // what is on its way settles
        int waiting = 0;
        for (int i = 0; i < count; i++) waiting += people[i].waits;
        if (!waiting) break;
        turn_once(20);
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 64;
    all_files();
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    for (char *at = argv[1]; at && *at && kept_count < 8; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        kept[kept_count++] = atoi(at);
    ipconfig = atoi(argv[2]);
    read_people(argv[3]);
    person_of = calloc(limit.rlim_cur, sizeof *person_of);
    ep = epoll_create1(0);
    fcntl(0, F_SETFL, O_NONBLOCK);
    char line[128];
    for (size_t have = 0;;) {
        turn_once(20);
        ssize_t n = read(0, line + have, 1);
        if (n == 0) return 0;
        if (n < 0 || line[have++] != '\n') continue;
        line[have - 1] = 0;
        have = 0;
        double began = now_s(), seconds, per_s;
        int bytes;
        if (!strcmp(line, "enter")) {
            int at = 0;
            while (live < count && now_s() < began + 120) {
                int under_way = 0;
                for (int i = 0; i < at; i++) under_way += people[i].stage != LIVE;
                for (; at < count && under_way < 256; at++, under_way++) people[at].due = now_s();
                turn_once(20);
            }
            if (live < count) die("only %d of %d came in within 120 s", live, count);
            printf("ready %d %.6f\n", live, now_s() - began);
        } else if (sscanf(line, "talk %lf %lf %d", &seconds, &per_s, &bytes) == 3) {
            talk(seconds, per_s, bytes);
        } else if (sscanf(line, "fall %lf", &seconds) == 1) {
            fell = refused = gave_up = 0;
            lists.size = 0;
            puts("waiting");
            fflush(stdout);
            double until = began + seconds, first = 0;
            while (now_s() < until && (fell == 0 || live < count)) {
                turn_once(10);
                if (fell && !first) first = now_s();
            }
            if (live < count) die("only %d of %d are back after %.0f s", live, count, seconds);
            double p50 = quantile_ms(&lists, 0.5), p99 = quantile_ms(&lists, 0.99), most = quantile_ms(&lists, 1);
            printf("back %d %.6f %.3f %.3f %.3f %d %d\n", fell, now_s() - first, p50, p99, most, refused, gave_up);
        } else {
            die("what is %s", line);
        }
        fflush(stdout);
    }
}
