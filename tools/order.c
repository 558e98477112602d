/* SPDX-License-Identifier: Apache-2.0 */
#include "order.h"

#include "random.h"

enum { KEY_ORDER = 7300 };

int order_of_round(uint64_t seed, int64_t round, int n, int i) {
    const uint64_t key = random_key(random_key(seed, KEY_ORDER), (uint64_t)(round / n));
    int arms[ORDER_MAX] = {0};
    for (int j = 0; j < n; j++) {
        const int at = (int)random_below(key, (uint64_t)j, (uint64_t)j + 1);
        arms[j] = arms[at];
        arms[at] = j;
    }
    return arms[(i + round) % n];
}
