/* SPDX-License-Identifier: Apache-2.0 */
/* Uses enough of the library that its dependencies must be there. */
#include <megamoe/megamoe.h>
#include <stdio.h>

int main(void) {
    megamoe_device *device = NULL;
    const megamoe_device_options options = {.struct_size = sizeof options, .threads = 1};
    if (megamoe_device_open("cpu", &options, &device) != MEGAMOE_OK) {
        fprintf(stderr, "%s\n", megamoe_last_error());
        return 1;
    }
    megamoe_device_close(device);
    puts(megamoe_version());
    return 0;
}
