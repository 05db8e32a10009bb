"""SGLang's memory pools on the CPU, which its adapter's tests share, and SGLang itself where no GPU is."""

from __future__ import annotations

import warnings

import torch

for name in ("nms", "qnms"):  # torchvision's own library needs CUDA's; SGLang needs only its Python
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of SGLang and all it imports
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

LAYERS, HEADS, DIM, PAGE, TOKENS = 4, 2, 64, 64, 512
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
DYNAMIC = {
    "backend_name": "kvquant",
    "module_path": "kvquant.integrations.sglang",
    "class_name": "KVQuantStorage",
    "interface_v1": 1,
}


def device_pool(dtype=torch.bfloat16, page=PAGE, layers=LAYERS, heads=HEADS, dim=DIM, **others):
    return MHATokenToKVPool(TOKENS, page, dtype, heads, dim, layers, "cpu", False, **others)


def host_pool(layout="layer_first", pool=None, page=PAGE, **others):
    pool = pool or device_pool(page=page, **others)
    info = pool.get_device_pool_infos()[0].buffer_info
    with host_memory_budget_scope(1 << 30):
        made = get_mha_host_pool_cls(info)(
            info,
            2.0,
            0,
            page,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=len(info.buffers.k),
        )
    if isinstance(made.kv_buffer, torch.Tensor) and made.dtype.itemsize > 1:
        made.kv_buffer.normal_()
    return made


def pages(pool, indices):
    return torch.stack([pool.get_data_page(at, flat=True) for at in indices[:: pool.page_size].tolist()])
