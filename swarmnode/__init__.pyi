from swarmnode.app.api import Run as Run
from swarmnode.app.api import RunHistory as RunHistory
from swarmnode.app.api import connect as connect
from swarmnode.app.api import plan as plan
from swarmnode.app.api import up as up
from swarmnode_methods.papers import PAPERS as PAPERS
from swarmnode_methods.papers import paper as paper
from swarmsim.api import Comparison as Comparison
from swarmsim.api import compare as compare
from swarmsim.api import simulate as simulate

__version__: str
