"""ms-swift: `--external_plugins FILE --use_liger_kernel true`, where FILE imports this module.

ms-swift trains with the Trainer of transformers, which runs our kernels for `use_liger_kernel` once this package is
imported, on the model with its adapters. Importing this file lets ms-swift find `liger_kernel`, and prints the report.
"""

from transformers import trainer

from liger_trainer.callbacks.kernel_report import KernelReportCallback
from liger_trainer.liger import stand_in
from liger_trainer.stock_trainer import liger_kernel_installed

if not liger_kernel_installed():
    stand_in.install()
trainer.DEFAULT_CALLBACKS.append(KernelReportCallback)  # type: ignore[arg-type]
