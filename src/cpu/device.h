/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU as a device, and the host's side of a GPU. */
#ifndef MM_CPU_DEVICE_H
#define MM_CPU_DEVICE_H

#include "base/device.h"

/* Opens the pool and chooses the kernels; on failure *device is NULL. */
MEGAMOE_CHECKED megamoe_status mm_cpu_open(const megamoe_device_options *options,
                                           megamoe_device **device);

/* Accepts NULL. */
void mm_cpu_close(megamoe_device *device);

/* Fills the members that speak of the host; name, model and tier too. */
void mm_cpu_describe(const megamoe_device *device, megamoe_device_info *info);

MEGAMOE_CHECKED megamoe_status mm_cpu_measure(megamoe_device *device,
                                              megamoe_device_ceilings *ceilings);

#endif
