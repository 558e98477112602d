/* SPDX-License-Identifier: Apache-2.0 */
/* All of megamoe: mixture-of-experts layers with 4-bit weights. Start reading at layer.h. */
#ifndef MEGAMOE_MEGAMOE_H
#define MEGAMOE_MEGAMOE_H

#include "checkpoint.h"
#include "comm.h"
#include "device.h"
#include "layer.h"
#include "log.h"
#include "placement.h"
#include "reference.h"
#include "router.h"
#include "status.h"
#include "trace.h"
#include "tune.h"
#include "types.h"
#include "version.h"
#include "weights.h"

#endif
