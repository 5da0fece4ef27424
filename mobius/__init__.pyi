from mobius.api import Result as Result
from mobius.api import finetune as finetune
from mobius.api import plan as plan
from mobius.planner.forecast import Forecast as Forecast

__version__: str
