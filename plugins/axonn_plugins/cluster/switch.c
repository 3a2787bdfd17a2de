/* The emulated cluster's network: nodes, which are network namespaces, and the switch between them.
 *
 *   axonn-switch NAME NODES LATENCY_NS BITS_PER_SECOND OWNER JITTER_PERMILLE
 *
 * Everything a cluster is belongs to this process and to nothing else: the namespaces have no name in the file system,
 * they are its file descriptors (other processes enter them through /proc/PID/fd). However it ends, the kernel takes
 * them away. It ends when the process OWNER does; OWNER 0 is nobody.
 *
 * A node has one full-duplex link. A packet leaves when the sender's link is free, its first bit reaches the receiver
 * LATENCY_NS later, give or take as much as JITTER_PERMILLE of it (evenly spread, no packet before an earlier one of its
 * sender), and it is there when the receiver's link has taken it in; both links serve in order of arrival and
 * take the packet's length over BITS_PER_SECOND (0: no time). Segmentation offload is passed through, so that up to
 * 64 KiB cross the switch in one read and one write.
 *
 * It says "ready" on standard output, or in words what failed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* plugins/axonn_plugins/cluster/switch.py knows these too. */
enum { MAX_NODES = 64, COUNTERS_FD = 3, NAMESPACE_FD = 100 };
static const char *const INTERFACE = "net0";
static const char *const ADDRESS = "10.77.0.%d"; /* of node i, with i + 1 */

enum { MTU = 9000, LONGEST_PACKET = 65535, READS_AT_ONCE = 16, QUEUED_PACKETS = 4000 };
/* What a node's link may hold back; like a switch's, its buffer is finite, and what is beyond is lost. */
static const size_t BUFFER_BYTES = 64 << 20;

typedef struct packet {
    struct packet *next;
    uint64_t due; /* ns */
    int source, destination;
    size_t length; /* with the virtio header */
    unsigned char data[];
} packet;

typedef struct {
    packet *head, *tail;
} queue;

typedef struct {
    int device;
    uint64_t out_free, in_free; /* when the link is free, ns */
    size_t held;                /* bytes sent and not yet delivered */
    queue flying, arriving;     /* sent and not yet at the receiver's link; in the receiver's link */
} node;

struct counters {
    uint64_t sent[MAX_NODES], received[MAX_NODES]; /* bytes of IP packets */
};

static node nodes[MAX_NODES];
static int node_count;
static uint64_t latency, bits_per_second, jitter;
static struct counters *counters;

static void fail(const char *what) {
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static int checked(int result, const char *what) {
    if (result < 0) fail(what);
    return result;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- the links ---- */

static void append(queue *q, packet *p) {
    p->next = NULL;
    if (q->head) q->tail->next = p;
    else q->head = p;
    q->tail = p;
}

static packet *take(queue *q) {
    packet *p = q->head;
    q->head = p->next;
    return p;
}

static size_t ip_bytes(const packet *p) { return p->length - sizeof(struct virtio_net_hdr); }

static uint64_t transmission(const packet *p) {
    return bits_per_second ? ip_bytes(p) * 8 * 1000000000u / bits_per_second : 0;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t flight(void) {
    uint64_t most = latency * jitter / 1000;
    return latency - most + (most ? (uint64_t)(drand48() * 2 * (double)most) : 0);
}

static void leave(packet *p) {
    node *source = &nodes[p->source];
    uint64_t start = later(now(), source->out_free);
    source->out_free = start + transmission(p);
    source->held += p->length;
    p->due = start + flight();
    if (source->flying.head) p->due = later(p->due, source->flying.tail->due);
    append(&source->flying, p);
}

static void arrive(packet *p) {
    node *destination = &nodes[p->destination];
    p->due = destination->in_free = later(p->due, destination->in_free) + transmission(p);
    append(&destination->arriving, p);
}

static void deliver(packet *p) {
    /* A receiver whose queue is full loses the packet, as on any network. */
    if (write(nodes[p->destination].device, p->data, p->length) > 0) counters->received[p->destination] += ip_bytes(p);
    nodes[p->source].held -= p->length;
    free(p);
}

/* The queue whose head is due first, or NULL; every queue is in order. */
static queue *first_due(void) {
    queue *first = NULL;
    for (int i = 0; i < node_count; i++) {
        queue *both[] = {&nodes[i].flying, &nodes[i].arriving};
        for (int j = 0; j < 2; j++)
            if (both[j]->head && (!first || both[j]->head->due < first->head->due)) first = both[j];
    }
    return first;
}

/* Let everything happen that is due, in the order of time; returns when the next thing is, 0 for never. */
static uint64_t advance(void) {
    queue *q;
    while ((q = first_due())) {
        if (q->head->due > now()) return q->head->due;
        packet *p = take(q);
        if (q == &nodes[p->source].flying) arrive(p);
        else deliver(p);
    }
    return 0;
}

static int destination_of(const unsigned char *data, size_t length) {
    struct iphdr header;
    if (length < sizeof(struct virtio_net_hdr) + sizeof header) return -1;
    memcpy(&header, data + sizeof(struct virtio_net_hdr), sizeof header);
    int last = (int)(ntohl(header.daddr) & 0xff) - 1;
    return header.version == 4 && last >= 0 && last < node_count ? last : -1;
}

static void receive(int source) {
    static unsigned char buffer[sizeof(struct virtio_net_hdr) + LONGEST_PACKET];
    for (int i = 0; i < READS_AT_ONCE; i++) {
        ssize_t length = read(nodes[source].device, buffer, sizeof buffer);
        if (length <= 0) return;
        int destination = destination_of(buffer, (size_t)length);
        if (destination < 0 || nodes[source].held > BUFFER_BYTES) continue;
        packet *p = malloc(sizeof *p + (size_t)length);
        if (!p) continue;
        p->source = source;
        p->destination = destination;
        p->length = (size_t)length;
        memcpy(p->data, buffer, p->length);
        counters->sent[source] += ip_bytes(p);
        leave(p);
    }
}

/* ---- setting up ---- */

static void claim(const char *name) {
    /* An abstract socket: it needs no file, and the name is free again when this process ends. */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int written = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "axonn-cluster/%s", name);
    socklen_t length = (socklen_t)offsetof(struct sockaddr_un, sun_path) + 1 + (socklen_t)written;
    int s = checked(socket(AF_UNIX, SOCK_STREAM, 0), "no socket");
    if (bind(s, (struct sockaddr *)&address, length) < 0) {
        if (errno == EADDRINUSE) puts("taken");
        else fail("cannot claim the name");
        exit(1);
    }
}

static void share_counters(void) {
    int memory = checked(memfd_create("axonn-cluster-counters", 0), "no shared memory");
    checked(ftruncate(memory, sizeof *counters), "no shared memory");
    counters = mmap(NULL, sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (counters == MAP_FAILED) fail("no shared memory");
    if (memory != COUNTERS_FD) {
        checked(dup2(memory, COUNTERS_FD), "no shared memory");
        close(memory);
    }
}

static void raise_interface(int s, struct ifreq *request) {
    checked(ioctl(s, SIOCGIFFLAGS, request), "cannot read the interface's flags");
    request->ifr_flags |= IFF_UP;
    checked(ioctl(s, SIOCSIFFLAGS, request), "cannot bring the interface up");
}

static void set_address(int s, struct ifreq *request, unsigned long what, const char *text) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    inet_pton(AF_INET, text, &address.sin_addr);
    memcpy(&request->ifr_addr, &address, sizeof address);
    checked(ioctl(s, what, request), "cannot set the address");
}

static void make_device(node *made) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, INTERFACE);
    made->device = checked(open("/dev/net/tun", O_RDWR | O_NONBLOCK), "cannot open /dev/net/tun");
    checked(ioctl(made->device, TUNSETIFF, &request), "cannot make a TUN device");
    checked(ioctl(made->device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4), "cannot set the TUN device's offload");
}

static void configure(int number) {
    int s = checked(socket(AF_INET, SOCK_DGRAM, 0), "no socket");
    struct ifreq request = {0};
    char address[INET_ADDRSTRLEN];
    strcpy(request.ifr_name, "lo");
    raise_interface(s, &request);
    strcpy(request.ifr_name, INTERFACE);
    snprintf(address, sizeof address, ADDRESS, number + 1);
    set_address(s, &request, SIOCSIFADDR, address);
    set_address(s, &request, SIOCSIFNETMASK, "255.255.255.0");
    request.ifr_mtu = MTU;
    checked(ioctl(s, SIOCSIFMTU, &request), "cannot set the MTU");
    request.ifr_qlen = QUEUED_PACKETS;
    checked(ioctl(s, SIOCSIFTXQLEN, &request), "cannot set the queue's length");
    raise_interface(s, &request);
    close(s);
}

static void make_node(int number) {
    checked(unshare(CLONE_NEWNET), "cannot make a network namespace");
    int space = checked(open("/proc/self/ns/net", O_RDONLY), "cannot open the namespace");
    checked(dup2(space, NAMESPACE_FD + number), "cannot keep the namespace");
    close(space);
    make_device(&nodes[number]);
    configure(number);
    /* Training computes between its collectives; a connection would start slowly again after each pause. */
    int setting = open("/proc/sys/net/ipv4/tcp_slow_start_after_idle", O_WRONLY);
    if (setting >= 0) {
        if (write(setting, "0", 1) < 0) { /* where /proc/sys is read-only the default has to do */
        }
        close(setting);
    }
}

static void watch(int poll, int descriptor, uint32_t who) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = who};
    checked(epoll_ctl(poll, EPOLL_CTL_ADD, descriptor, &event), "cannot watch a descriptor");
}

enum { TIMER = MAX_NODES, OWNER };

static void watch_owner(int poll, pid_t owner) {
    if (!owner) return;
    int handle = (int)syscall(SYS_pidfd_open, owner, 0);
    checked(handle, "cannot watch the owner (Linux 5.3 can)");
    if (getppid() != owner) exit(1); /* it ended before, and the number may be another's */
    watch(poll, handle, OWNER);
}

static void run(int poll, int timer) {
    for (;;) {
        uint64_t due = advance();
        struct itimerspec at = {.it_value = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        struct epoll_event events[MAX_NODES];
        int count = epoll_wait(poll, events, MAX_NODES, -1);
        for (int i = 0; i < count; i++) {
            uint64_t expirations;
            if (events[i].data.u32 == OWNER) return;
            if (events[i].data.u32 != TIMER) receive((int)events[i].data.u32);
            else if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN) return;
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    node_count = atoi(argv[2]);
    if (node_count < 1 || node_count > MAX_NODES) return 2;
    latency = strtoull(argv[3], NULL, 10);
    bits_per_second = strtoull(argv[4], NULL, 10);
    jitter = strtoull(argv[6], NULL, 10);
    if (jitter > 1000) return 2;
    share_counters();
    claim(argv[1]);
    int poll = checked(epoll_create1(0), "no epoll");
    int timer = checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK), "no timer");
    watch_owner(poll, (pid_t)atoi(argv[5]));
    watch(poll, timer, TIMER);
    int home = checked(open("/proc/self/ns/net", O_RDONLY), "cannot open the namespace");
    for (int i = 0; i < node_count; i++) {
        make_node(i);
        watch(poll, nodes[i].device, (uint32_t)i);
    }
    checked(setns(home, CLONE_NEWNET), "cannot return from the namespaces");
    checked(chdir("/"), "cannot leave the working directory");
    /* A network does not wait for the nodes' processors. Where it may not go before them, it takes its turn. */
    struct sched_param first = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &first);
    puts("ready");
    fclose(stdout);
    run(poll, timer);
    return 0;
}
