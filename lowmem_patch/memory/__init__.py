"""The peak memory of training, predicted from fake tensors and arithmetic."""

from lowmem_patch.memory.few_blocks import make_plans as make_plans
from lowmem_patch.memory.model_states import Training as Training
from lowmem_patch.memory.model_states import model_state_bytes as model_state_bytes
from lowmem_patch.memory.model_states import parse_bytes as parse_bytes
from lowmem_patch.memory.optimizers import OPTIMIZERS as OPTIMIZERS
from lowmem_patch.memory.predict import MemoryReport as MemoryReport
from lowmem_patch.memory.predict import largest_size as largest_size
from lowmem_patch.memory.predict import largest_that_fits as largest_that_fits
from lowmem_patch.memory.predict import most_positions as most_positions
from lowmem_patch.memory.predict import predict_memory as predict_memory
from lowmem_patch.memory.step import MOMENTS as MOMENTS
from lowmem_patch.memory.step import run_step as run_step
