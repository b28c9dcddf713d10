"""Build ``data/sample_reviews.csv``: synthetic Chinese hotel reviews in the form of the ChnSentiCorp hotel CSV.

    python data/make_sample_reviews.py                 # rewrites data/sample_reviews.csv, prints its figures
    python data/make_sample_reviews.py --output PATH   # writes elsewhere

No guest wrote these reviews and no real hotel is meant: a small grammar composes them from the phrase banks below.
The label is the review's *overall verdict*, never drawn at random. Both classes praise and complain in the same words;
what decides is the verdict, the order ("虽然 A，但 B" is about B), the comparison, or the irony. That keeps the file
from being trivial for a model that only counts words.

How to read the banks: ``+`` praises, ``-`` complains, ``~`` does neither; ``[a|b]`` is one of a and b (they nest);
``{name}`` is an entry of ``SLOTS``; in a frame, ``{praise}`` and ``{complaint}`` are whole remarks.

Only ``random.Random.random`` draws: it alone is documented to give the same sequence on every Python version.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

SEED = 20240607
POSITIVE_ROWS = 1632
NEGATIVE_ROWS = 768
POSITIVE, NEGATIVE = 1, 0

# ------------------------------------------------------------------------------------------------------ phrase banks

SLOTS = {
    "hotel": "酒店|酒店|宾馆|饭店",
    "city": "北京|上海|杭州|成都|西安|青岛|厦门|南京|苏州|昆明|桂林|武汉|大连|三亚|长沙|哈尔滨|广州|深圳|重庆|洛阳",
    "place": "火车站|地铁口|步行街|展馆|海边|景区大门|长途汽车站|大学|老街|客户公司|会议中心|医院|商场",
    "few": "3|5|8|10|两三|四五|七八|十来",
    "many": "25|30|40|50|二十多|四十多",
    "times": "两|三|四|五|六|3|4|5",
    "nights": "一|两|三|四|2|3|5",
    "price": "138|168|198|218|258|288|328|368|398|428|488|560|680|880|1280",
    "small": "10|15|20|30|38|50|68",
    "clock": "早上8点|中午12点|下午2点|下午4点|傍晚6点|晚上9点|晚上11点|半夜12点|凌晨1点",
    "late": "10点|11点|11点半|半夜12点|凌晨1点|凌晨3点",
    "early": "5点|5点半|6点|6点半|7点",
    "floor": "2楼|3楼|5楼|6楼|8楼|11楼|16楼|23楼|顶楼",
    "stairs": "4楼|5楼|6楼|五楼|六楼",
    "room": "标间|大床房|标准间|豪华间|商务房|家庭房|高级房|特价房|海景房|套房",
    "month": "1月|3月|4月|5月|6月|7月|8月|9月|10月|11月|12月|五一|国庆|春节|暑假|上个月",
    "who": "我|我们|我和同事|我和老公|我和老婆|一家三口|我带父母|几个朋友|我和女朋友|公司十几个人",
    "trip": "出差|开会|旅游|看展|自驾|度假|探亲|参加培训|陪孩子考试|谈生意|转机",
    "other": "隔壁那家|街对面那家|上次住的那家四星|那家连锁快捷|朋友推荐的那家|市中心那家",
    "star": "三星|四星|准四星|五星|快捷|商务型",
    "high": "8|9|8.5|9.5|九",
    "low": "2|3|4|3.5|四",
}

# Each aspect stands on its own feet: a remark names what it is about, so that any remarks can follow each other.
ASPECTS = """
# 位置
+ 位置[很好|不错|没得说|确实方便]，[走路|步行]{few}分钟就到{place}
+ 地段[好|不错]，出门就是{place}，[吃饭|逛街|办事]都[方便|近]
+ [地理位置|位置]是这里最大的优点，去哪儿都[近|顺路]
+ 闹中取静，[拐个弯|走几步]就是{place}
+ 位置比地图上看的要好，一点不偏
- 位置[偏|太偏了|有点偏]，走到{place}要{many}分钟
- 说是离{place}近，[其实|实际上]走了{many}分钟还没到
- 地方不好找，[司机|出租车]绕了{times}圈才找到门口
- 位置谈不上好，周围[黑灯瞎火|什么都没有]，晚上不敢出门
- 网上写步行{few}分钟到{place}，那得是跑步
~ {hotel}在{place}[旁边|附近|后面]，走路大概{few}分钟
~ 位置[一般|就那样|马马虎虎]，看你去哪里办事
# 交通
+ 门口[好几路|就有]公交，打车[起步价|十几块]就到市区
+ 出门就能打到车，去{place}[很快|不堵]
+ 地铁下来就是，拖着箱子也不累
- 打车[很难|要等半小时]，门童也不[帮忙|管]
- 公交只有一路，[6点半|8点|9点]以后就没有了
- 门口修路，[车进不来|出租车都不愿意来]，拖着箱子走了{many}分钟
- 出租车不打表，从{place}过来要了{small}块
~ 从{place}打车过来{small}元左右
~ 坐公交要[倒一次车|走一小段]，打车{small}块钱
# 房间
+ 房间[很大|挺大|够大|宽敞]，[东西齐全|布置得很温馨|采光也好]
+ 房间比[照片上|想象中|预想的]还[大|好|新]
+ {room}[不小|很实用]，还有[飘窗|小阳台|沙发|写字台]
+ 房间虽说不大但[五脏俱全|布置合理]，[两个人|一个人]住正好
+ 一进房间[眼前一亮|就觉得舒服]，小细节[做得好|很用心]
- 房间[太小|小得可怜|很小|又小又旧]，[箱子都打不开|转个身都难]
- 房间比[照片上|想象中|预想的][小多了|差很多|旧很多]
- {room}没有窗户，[白天也要开灯|闷得不行|像个地下室]
- 说好的{room}，到了给换成[朝北|靠马路|最里面]的小间
- 房间[又潮又暗|阴暗潮湿]，被子都是[潮的|湿乎乎的]
~ 房间[大小|面积]一般，[该有的都有|一个人住可以]
~ 我住的是{floor}的{room}，[格局比较普通|不大不小]
# 装修
+ 装修[很新|有品位|挺有特色|很雅致]，[不俗气|看着舒服]
+ 刚装修过，[设施|家具]都是新的，[没有什么味道|不刺鼻]
+ 大堂[气派|很漂亮|有格调]，走廊里还挂着[老照片|水墨画|“福”字剪纸]
+ 虽是老楼，[维护得很好|保养得不错]，别有味道
- 装修[太旧|陈旧|老掉牙]，[墙纸都翘了|地毯上全是烟洞]
- 设施[老化|陈旧]，[柜门关不上|椅子腿是松的|抽屉拉不开]
- 正在装修也不提前说，[电钻响了一天|大堂里全是灰]
- 大堂看着[气派|漂亮]，上了楼就[露馅了|是另一回事]
- 所谓“{star}”标准，装修顶多[招待所水平|算二星]
~ 装修是[老式的|中规中矩的|十年前的风格]
~ 听说[明年|下半年]要重新装修
# 卫生
+ [卫生|房间卫生]做得[好|不错|很到位]，[床单雪白|边边角角都干净]
+ 很干净，[看不到灰|洗手池擦得发亮]
+ 每天打扫得[很仔细|干干净净]，东西也摆得整齐
- 卫生[不敢恭维|太差|不过关]，[床底下有烟头|杯子上有口红印]
- 床单上有[头发|黄渍|血点]，[叫人来换还不高兴|看着就恶心]
- 谈不上干净，[桌子上一层灰|地毯粘脚|墙角有蜘蛛网]
- 房间里有[蟑螂|蚊子|小虫子]，[一晚上没睡|打死了{times}只]
- 出去一整天回来房间都没打扫，[打电话催了{times}次|毛巾还是湿的]
~ 卫生[还可以|一般|过得去]
~ 打扫房间要[挂牌子|提前打电话]
# 床
+ 床[很舒服|又大又软|软硬正好]，[一觉到天亮|睡得很香]
+ 枕头有[“软”“硬”两种|高低两种]可以选，[被子很轻很暖|床品手感好]
+ 睡得[踏实|很好]，[“认床”的人|老人]也没说不舒服
- 床[太硬|太软|一翻身就响]，[睡得腰疼|一夜没睡好]
- 床垫中间是[塌的|凹的]，[两个人往中间滚|早上起来浑身疼]
- 枕头[又高又硬|一股油味]，[垫衣服睡的|落枕了]
- 所谓大床是两张[小床|单人床]拼的，中间一条缝
~ 床偏[硬|软]，[看个人习惯|习惯就好]
~ 床是1米[2|35|5]的
# 卫生间
+ [卫生间|浴室][很大|干湿分开|很干净]，[淋浴水流大|还有浴缸]
+ 洗澡[很舒服|痛快]，[水量足|不用等]
+ 卫生间[用品齐全|牙刷梳子样样有]，毛巾[很白|很厚]
- [卫生间|浴室][太小|有异味|下水道返味]，[门也关不严|转不开身]
- 洗个澡水漫[金山|了一地]，[地漏是堵的|拖鞋都漂起来了]
- 马桶[漏水|冲不干净|一直响]，[报修了没人来|修了{times}次才好]
- 淋浴龙头[是坏的|喷不准|一碰就掉]，只能[蹲着洗|凑合]
- 浴帘[发霉|发黑]，[看一眼就不想洗|不敢碰]
~ 卫生间是[玻璃隔断|淋浴房]，[没有浴缸|介意的要注意]
~ 浴室不大，[转得开身|能用]
# 热水
+ 热水[24小时都有|一开就来]，[水很大|水温稳定]
+ 冬天洗澡水[够热|很热]，一点不冷
- 热水[忽冷忽热|时有时无]，[洗到一半变凉水|烫得跳起来]
- 放了{few}分钟的水还是[凉的|温吞水]
- {late}以后就没热水了，[也没人说一声|说是锅炉坏了]
~ 热水要放[一会儿|几分钟]才来
# 空调
+ 空调[很给力|很足|安静]，[外面三十几度里面很舒服|温度好调]
+ 有暖气又有空调，[冬天一点不冷|暖和]
- 空调[像拖拉机|声音大|嗡嗡响了一夜]，[关了又热|开着睡不着]
- 空调[不制冷|不制热|是摆设]，[热了一身汗|盖两床被子还冷]
- 中央空调[{late}就停|自己不能调]，[热得半夜开窗|冻感冒了]
~ 空调是[老式窗机|中央空调]，[声音不算小|温度统一的]
# 隔音
+ [很安静|隔音好|一点不吵]，[关上窗听不到车声|晚上睡得踏实]
+ 靠马路居然[不吵|听不到什么声音]，窗户[是双层的|密封好]
- 隔音[太差|几乎没有|不敢恭维]，[隔壁打电话听得一清二楚|走廊里有人走路都听得见]
- 楼下[KTV|夜市|工地|大排档][吵到{late}|一直响]，[根本睡不着|戴耳塞都没用]
- 一早{early}就被[旅行团|打扫的|敲门声]吵醒
- 隔壁[麻将打到|电视开到]{late}，[找前台也没用|没人管]
~ 靠[马路|电梯]的房间[有点声音|会吵一点]，[睡得浅的|怕吵的]要里面的
~ 隔音[一般|不好不坏]
# 网络
+ [上网|宽带]免费，[速度很快|看电影都不卡]
+ 房间有网线，[大堂有无线|插上就能用]，[收发邮件|办公]方便
+ wifi信号[满格|很好]，不用[密码|登录来登录去]
- 上网[要收费|一小时{small}块]，[慢得要命|还老断线]
- [网速|宽带]慢得[像拨号|邮件都发不出去]，[打电话问说重启一下|没人懂]
- 号称“免费wifi”，[房间里没信号|要蹲在门口才有]
~ 上网[一天{small}元|要到前台要密码]
~ 网速[一般|聊QQ够了]
# 电视
+ 电视[很大|台多|是液晶的]，[还有英文频道|看球很爽]
- 电视[全是雪花|只有七八个台|还是老式的]，[遥控器没电|怎么调都不清楚]
~ 电视没开，不知道怎么样
~ 电视节目[不多|跟家里差不多]
# 早餐
+ [早餐|自助早餐|breakfast][很丰富|品种多|不错|好吃]，[中式西式都有|现煮的面很香|豆浆是现磨的]
+ 早饭[吃得很饱|每天换花样|合老人孩子的胃口]，[环境也好|补得也快]
+ 特别要说[早餐|早点]，[小笼包|米粉|煎蛋|粥]比外面店里的还好
- 早餐[太差|简单得可怜|没什么可吃的]，[就馒头稀饭咸菜|吃了一次就不想再吃]
- 早餐品种[不多|太少|三天不变]，[都是凉的|去晚了盘子都空了|要排队]
- 早饭[8点半|9点|9点不到]就收了，[去晚一点只剩白粥|服务员催着走]
- 早餐要{small}元一位，[还不如门口两块钱的煎饼|实在不值]
~ 早餐[一般|凑合|还可以|就那几样]
~ 早餐[是送的|要另外买]，我们[没去吃|吃了一次]
# 餐厅
+ 楼下餐厅[味道不错|菜做得好|价格公道]，[招待客户有面子|服务员推荐的菜都好吃]
+ 晚饭在{hotel}吃的，[不贵|一百多块三个人吃饱]，[味道地道|上菜快]
- 餐厅[又贵又难吃|菜里有头发]，[点了{times}个菜没一个能吃的|等了一个小时才上菜]
- [送餐|room service][要等一个多小时|送来都凉了]，[一碗面{small}块|还漏了一份]
~ 餐厅[没去试|菜价偏高]，[附近小馆子多|楼下就有快餐]
# 服务
+ 服务[很好|热情|周到|没得说]，[有求必应|主动帮拿行李|问什么都耐心]
+ 服务员[很有礼貌|见面都问好|态度好]，[让人有“回家”的感觉|不做作]
+ [阿姨|打扫的阿姨|保安]人很好，[借针线马上送来|还帮我找回了充电器]
+ 服务意识[强|很到位]，[一个电话{few}分钟就来|生日还送了蛋糕]
- 服务[太差|跟不上|很冷淡|不敢恭维]，[问什么都说不知道|叫半天没人理]
- 服务员[爱理不理|态度生硬|站着聊天]，[好像欠了他钱|一点不专业]
- 打了{times}次电话要[毛巾|吹风机|开水]，[最后自己下去拿的|没一次送来]
- 服务员没敲门就[进来了|刷卡开门]，[吓了一跳|连句道歉都没有]
~ 服务[一般|中规中矩|说不上好坏]
~ 服务员[多是实习生|年纪不大]，[比较生疏|话不多]
# 前台
+ 前台[热情|效率高|笑眯眯的]，[check in {few}分钟就好|入住{few}分钟就办好|主动给了安静的房间]
+ 前台小姑娘[很耐心|服务好]，[还画了张地图|帮忙叫车订票]
+ 半夜[12点|1点|2点多]到的，前台[还是很客气|马上就办好了]
- 前台[慢|效率太低|乱成一团]，[入住排了{many}分钟的队|填了两遍单子]
- 前台[冷着脸|态度恶劣|头都不抬]，[问一句答一句|把身份证一扔]
- 明明有预订，前台说[没有|查不到]，[折腾了一个小时|让我们在大堂干等]
~ 前台[人手少|只有一个人]，[高峰要等|办得不快不慢]
~ 入住手续[跟别处一样|要登记每个人的身份证]
# 行李
+ 行李员[很主动|跑得快]，[送到房间不肯收小费|退房后还免费寄存了半天]
- 行李[没人帮|自己扛上{stairs}]，[门童就在旁边看着|三个箱子爬楼梯]
- 寄存的行李[被压坏了|差点被别人拿走]，[没人负责|只说对不起]
~ 退房后行李可以放[前台|大堂角上]
# 停车
+ 停车[方便|免费]，[有地下车库|保安还帮着指挥倒车]
- 停车[难|位太少]，[转了{times}圈停在马路上|还要收{small}块]
- 车停在{hotel}门口被[划了|贴了条]，[说跟他们没关系|保安说没看见]
~ 停车[一天{small}元|要凭房卡]
# 电梯
+ 电梯[多|快|要刷房卡]，[不用等|觉得安全]
- 电梯[只有一部|又小又慢|老是坏]，[等{few}分钟是常事|早上挤不进去]
- 没有电梯，[住{stairs}爬得半死|老人家受不了]
~ 电梯[两部|有点慢]，[人多要等一等|够用]
# 接机
+ 接机[很准时|免费]，[师傅一路介绍景点|举着牌子等，车也干净]
+ 晚点了两个小时，接机的[司机|师傅]还在等，[没加钱|没一句怨言]
- 说好的接机[没人来|晚了一个小时]，[打电话说忘了|最后自己打车]
- 机场班车[不准点|说停就停]，[差点误了飞机|{many}分钟一趟还坐不上]
~ 机场大巴[一天几班|{small}块一位]，[要提前约|时间要算好]
# 退房
+ [退房|check out][很快|不用查房|一分钟搞定]，[还延到下午2点|走时送了两瓶水]
- [退房|check out][慢|查房查了{many}分钟]，[差点误了火车|一队人等着]
- 退房时说[毛巾少一条|杯子破了|用了东西]，[硬扣了{small}元|吵了半天]
- 超了{few}分钟要[加收半天|多付{small}块]，[一点不通融|事先也不说]
~ 退房是[中午12点|下午1点]，[没什么特别|照常查房]
# 押金
+ 押金[不用交|当场退清]，[信任客人|很爽快]
- 押金[退得慢|半个月还没退回来]，[打了{times}次电话互相推|说让等财务]
- 押金条丢了就[不给退|要扣{small}]，[身份证都不认|说是规定]
~ 押金交了[300|500|1000]，[刷卡也行|要现金]
# 发票
+ 发票[开得快|抬头不用说第二遍]，[报销没问题|提前就准备好了]
- 发票[开错|少开]了{times}次，[最后让我过两天来拿|说没了，寄过来至今没收到]
~ 发票[是手写的|要加税点]
# 价格
+ 价格[便宜|公道|实惠]，{price}[含双早|这个价位很难得]
+ {price}块住这样的[房间|条件]，[值|划算|没话说]
+ 性价比[高|很高|在附近算最高的]
- 价格[太贵|偏高|虚高]，{price}[还不含早餐|不如多走两步住别家]
- {price}块住这样的[房间|条件]，[不值|太黑了|冤枉]
- 性价比[低|太低|不高]
- 网上订{price}，门市[反而便宜|才一半]，[问前台说没办法|心里不是滋味]
~ 价格{price}，[淡季可能会便宜|周末要加钱]
~ 房价{price}，[跟附近的差不多|不算贵也不便宜]
# 周边
+ 周边[吃的多|热闹|生活方便]，[楼下就有超市|小吃一条街很近]
+ 附近[公园|湖边]早上散步[很好|空气好]
- 周边[荒凉|太乱|全是工地]，[想买瓶水都难|吃饭要走{many}分钟]
- 楼下[发廊|小卡片|夜总会]多，[带孩子来不合适|半夜还有骚扰电话]
~ 附近有[便利店|药店|银行]，[别的没太留意|晚上关得早]
# 风景
+ 窗外[能看海|就是湖|看得到江]，[早上看日出|景色]很美
+ 院子里[花开得好|树多|有小桥流水]，[小孩很喜欢|适合发呆]
- 说好的“[海景|江景|湖景]”，[只能看见一面墙|要把头伸出窗外才看得到一条线]
- 窗外是[别人家厨房|空调外机|垃圾站]，[窗都不敢开|帘子一直拉着]
~ 窗户对着[马路|内院|另一栋楼]
# 泳池
+ 游泳池[干净|水温合适]，[健身房器材也新|孩子玩得不肯走]
- 游泳池[没开|水很浑|要另收{small}]，[网上可写着免费|健身房只有一台跑步机]
~ 游泳池和健身房[没时间去|没用过]
# 安全
+ 保安[24小时巡逻|负责]，[女生一个人住也放心|很有安全感]
- 门锁[是坏的|一推就开]，[拿椅子顶着门睡|换房还要补差价]
- 房间里丢了[{small}块钱|充电器|一条项链]，[没有监控|说让我报警]
~ 房门是[插卡的|老式钥匙]
# 叫醒
+ 叫醒服务[准时|打了两遍]，[赶早班机还给打包了早餐|放心睡]
- 约了[{early}叫醒|叫醒服务|morning call]，[没人打|晚了半小时]，[飞机差点没赶上|害我开会迟到]
~ 叫醒是[自动语音|机器打的]
# 洗衣
+ 洗衣[当天就好|叠得整齐]，[不贵|扣子掉了还给缝上]
- 洗衣把[衬衫洗黄了|西装弄丢了]，[只赔{small}块|还说本来就这样]
~ 洗衣[自己解决的|一件{small}元]
# 孩子
+ 对小孩[友好|很照顾]，[送了玩具和小拖鞋|加床没收钱]
- 带孩子[不方便|很不便]，[加床要{small}0块|儿童椅都没有]
~ 带了小孩，[加床{small}0|1米2以下早餐免费]
# 开会
+ 会议室[设备好|够大]，[茶歇不错|有人一直盯着音响]
- 会议室[投影是坏的|话筒没声音|空调不冷]，[老板脸都绿了|找人找了半天]
~ 会议室在{floor}，[能坐几十个人|没进去]
# 预订
+ 预订[顺利|确认得快]，[临时改日期也没扣钱|到店房间已经留好]
- 订好的房[到店说没了|被卖给别人]，[让我们去别家|站在大堂{many}分钟]
- 改一天日期[要扣一晚房费|死活不行]，[客服酒店互相推|说系统定的]
~ 是[网上|电话|提前一周]订的，[到店付款|预付的]
# 气味
+ 房间[没有异味|空气清新]，[开窗就是树|不像有些酒店一股烟味]
- 一进门[一股霉味|烟味呛人|油漆味刺鼻]，[开窗通风一晚没散|头疼]
~ 房间里[有一点味道|点了香]，[开窗就好|有人可能不习惯]
# 用品
+ [水果|矿泉水|茶叶]每天送，[拖鞋也厚|浴袍很舒服]
+ 房间里[熨斗|吹风机|雨伞]都有，[想得周到|不用再问前台要]
- [拖鞋|牙刷|毛巾][薄得像纸|一用就断|黑乎乎的]，[不如自己带|问就说都这样]
- 连[吹风机|烧水壶|卫生纸]都没有，[要了半天|说借完了]
~ 一次性用品[一般|要自己带]
# 升级
+ 前台[主动|免费]给升级到[套房|海景房|豪华间]，[很惊喜|没多要一分钱]
- 说是“免费升级”，[结果退房要补{small}0|换了间更吵的]
- 同样的价[同事|后来的人]住的是大间，我[分到小间|靠电梯]，[问就说随机|不给换]
~ 是[会员|积分]换的，[按普通价|没享受到什么]
# 灯光
+ 灯光[柔和|看书正好]，[床头有插座|开关在手边]
- 灯[太暗|坏了{times}个]，[看书伤眼|像鬼屋]，插座[也没几个|松得插不住]
~ 灯[偏黄|开关有点多]
"""

OPENINGS = """
{month}去{city}{trip}，{who}住了{nights}晚。
{who}来{city}{trip}，住的{room}。
第{times}次住这里了。
{trip}住的，订的是{room}，{price}一晚。
刚从{city}回来，写几句给后面的人参考。
因为{trip}，[公司|朋友|客户]给订了这家。
替[朋友|领导|父母]订的，[他们|人家]回来说的。
{clock}到的{hotel}，
在{city}住过不少{hotel}，说说这家。
[简单|老实|客观]说两句：
[结论放在最后|不多说]，讲几点：
住的{floor}，
"""

# Verdicts come in pairs of nearly the same words, so that single characters don't give the class away.
VERDICTS = """
+ [总的来说|总体|总之|综合下来][还是|是]满意的
- [总的来说|总体|总之|综合下来][还是|是]不满意的
+ 下次[来{city}|再来|有机会]还会[住|选择|考虑]这里
- 下次[来{city}|再来|有机会]不会再[住|选择|考虑]这里
+ [很|比较|非常]值得推荐
- [真的不|实在不|谈不上]值得推荐
+ [这个价钱|这个价|{price}块]，值了
- [这个价钱|这个价|{price}块]，不值
+ 比[想象|预期|别人说]的[好|好不少]
- 没有[想象|预期|别人说]的[好|那么好]
+ 这些都是小问题，[不影响|无伤大雅]
- 这些可都不是小问题，[很影响|忍不了]
+ 住得[舒心|开心|踏实]
- 住得[不舒心|不开心|不踏实]
+ 没有理由不再来
- 没有理由再来
+ 满分十分的话，我给{high}分
- 满分十分的话，我给{low}分
+ 同事问起来，我会说：去住吧
- 同事问起来，我会说：换一家吧
+ 已经把它[加进|放进|列入]我的常住名单
- 已经把它从我的常住名单里[划掉|去掉|删了]
+ 还会来吗？[会的|当然|一定]
- 还会来吗？[算了吧|不了|还是免了]
+ 本来只订一晚，第二天又[续了|加了]{nights}晚
- 本来订了{nights}晚，第二天就[退了|换了别家]
+ 走的时候[还有点舍不得|已经在想下次什么时候来]
- 走的时候[头也没回|只想快点离开]
+ 在{city}就认这家了
- 在{city}住哪家也不住这家了
+ [优点|好处]比缺点多得多，[满意|知足了]
- [缺点|毛病]比优点多得多，[失望|受够了]
+ 一句话：[不错|可以住|住得值]
- 一句话：[不行|别住|住得冤]
+ 比同价位的[强|好][一些|很多]
- 比同价位的[弱|差][一些|很多]
+ 朋友来了我也会安排在这儿
- 朋友来了我可不敢安排在这儿
+ 老妈说好，那就是真的好
- 老妈说忍忍，那就是真的不好
+ [五星好评|好评]给得心甘情愿
- [五星好评|好评]实在给不出手
"""

# Frames in which order, comparison or expectation decides: the same remarks in both classes.
FRAMES = """
+ 虽然{complaint}，但{praise}
- 虽然{praise}，但{complaint}
+ 尽管{complaint}，[不过好在|可是]{praise}，[相比之下|两相比较]前面那点不算什么
- 尽管{praise}，[不过可惜|可是]{complaint}，[相比之下|两相比较]前面那点不算什么
+ 以前住的时候{complaint}，这次来[完全变了|不一样了]，{praise}
- 以前住的时候{praise}，这次来[完全变了|不一样了]，{complaint}
+ 网上有人说{complaint}，我[差点没敢订|很担心]，住下来才知道{praise}
- 网上有人说{praise}，我[冲这个才订的|很期待]，住下来才知道{complaint}
+ {other}{complaint}，[换到这里|这家]就没有这种事，{praise}
- {other}{praise}，[换到这里|这家]就没有这种好事，{complaint}
+ 除了{complaint}，[别的|其他方面]都[好|满意|挑不出毛病]：{praise}
- 除了{praise}，[别的|其他方面]都[差|不满意|挑不出优点]：{complaint}
+ 头一天{complaint}，跟经理说了以后[马上换房|当场解决]，后面{praise}
- 头一天{praise}，以为[运气好|捡到宝了]，后面{complaint}
+ {complaint}[？|，]那是[别人|从前|网上]说的，我这次{praise}
- {praise}[？|，]那是[别人|从前|网上]说的，我这次{complaint}
+ 刚进门时{complaint}，心里凉了半截，没想到{praise}，[一晚上下来|住完]改主意了
- 刚进门时{praise}，心里挺高兴，没想到{complaint}，[一晚上下来|住完]改主意了
+ 老公嫌{complaint}，我倒觉得{praise}，[最后他也服了|他后来也承认我对]
- 老公夸{praise}，我倒觉得{complaint}，[最后他也服了|他后来也承认我对]
+ {praise}，光这一条就[够了|抵得过]，{complaint}也认了
- {complaint}，光这一条就[够了|抵得过]，{praise}也没用
"""

# Irony complains in words of praise; the teasing + lines praise in words of complaint.
IRONY = """
- 服务真是“周到”，[毛巾|开水|吹风机]要了{times}次才[有人应|送来一半]
- 果然“{star}”，[{stairs}没电梯|热水限时供应|床单带花纹，细看是污渍]
- 太“安静”了，隔壁[打呼噜|说梦话]的内容我都能[背下来|记笔记]
- 早餐“丰富”得很，[馒头、切开的馒头、昨天的馒头|白粥、稀一点的白粥、米汤]
- 前台小姐的微笑[真好看|很甜]，可惜是[对着手机|对着老外]的
- 感谢{hotel}让我[体验了一回|重温了][大学宿舍|插队的日子]
- 真“贴心”，{late}派人来敲门[问要不要退房|送别人点的面]
- 恭喜我们，花{price}块住进了[博物馆|仓库]，[家具都是文物|落灰也是原装的]
- 空调很“智能”，[想热的时候吹冷风|半夜自己开演唱会]
- 好在[蟑螂|蚊子]很热情，[全程陪同|一夜没让我寂寞]
- [海景|湖景]房名副其实，[卫生间漏水，地上就是海|下雨时窗台上就有湖]
- 网速“飞快”，[一封邮件发了一个上午|打开首页够我洗个澡]
- 停车“免费”，[罚单另算|车漆算小费]
- 赞一个！押金[退得真快|效率真高]，才等了[二十天|四十天|一个半月]
- 推荐给[想减肥的|想练胆量的|仇人]，[保证满意|效果很好]
- 强烈推荐，[推荐给我的竞争对手|推荐给睡得着的人]
- 大堂香气扑鼻，[原来是厕所在旁边|原来盖的是霉味]
- 好一个“免费升级”，从[朝南升到朝北|三楼升到没电梯的六楼]
- 经理态度“诚恳”，[道了{times}次歉，什么也没解决|说对不起说得比我还顺]
- 五星，给的是[对面那家面馆|门口的流浪猫]
- 性价比之高，[住一晚记一辈子|让人再也不敢住第二晚]
- 环境优美，服务热情，早餐可口——以上都是[广告里的|网页上的]话
+ 唯一的毛病就是床太[舒服|软]，[误了早班车|孩子赖着不肯起]
+ 差评！早餐太[好吃|丰富]，[害我胖了三斤|减肥计划泡汤]
+ 本来想挑点毛病，[挑了{nights}天没挑出来|结果一条也没写成]
+ 太过分了，[退房时还送水果|下雨还追出来送伞]，让人怎么好意思不来
+ 千万别一个人来，[不然会后悔没带家人|这么好的景没人分享太可惜]
+ 受不了这个{hotel}，[换了别家都住不惯了|把我胃口养刁了]
+ 缺点：[离开的时候难受|房太少，总订不到]
+ 最不满意的是[自己|公司]，[只订了一晚|假期太短]
+ 吵，非常吵——[早上全是鸟叫|窗外一片蛙声]，城里人哪听过这个
+ 投诉一下：[服务员太客气，弄得我不好意思|枕头太舒服，回家睡不着]
+ 老婆骂我了，骂我[怎么不早订这家|为什么只住{nights}晚]
+ 被坑了，被{other}坑了好几年，[早该住这儿|早知道就来这里]
+ 说这里不好的，[大概没住过|怕是走错门了]
+ 失望？[失望的是没房了|只失望没多住两天]
+ 骗人！照片[拍得太难看|没拍出一半的好]
"""

SHORT = """
+ [很好|不错|挺好|蛮好|还不错|可以|good|Very good|满意|很满意|OK]
+ [性价比|位置|服务|早餐|环境][很好|不错|挺好|没得说]
+ [下次|有机会|一定][还来|再来|还住]
+ [住得|睡得][舒服|踏实|很好]，[推荐|还会来|赞一个]
+ [没的说|没什么可挑的|挑不出毛病|不比五星差]
+ [一如既往|一直]的[好|满意|舒服]
+ {price}块，[值|超值|划算]
+ [方便|干净|安静]，[不贵|便宜|舒服]
+ [比预期好|没想到这么好|不后悔]
+ 老[客户|地方]了，[放心|不用多说]
+ [小毛病有|旧是旧点|小是小点]，[但值|可是舒服|还会来]
- [很差|太差|差|不好|不行|失望|很失望|不满意|bad|Not good|一般，偏差]
- [性价比|位置|服务|早餐|环境][很差|不行|太差|不敢恭维]
- [下次|以后|再也][不来了|不住了|不会来]
- [住得|睡得][难受|不踏实|不好]，[不推荐|不会来|郁闷]
- [没法说|没什么可夸的|挑不出优点|连二星都不如]
- [一次不如一次|一年比一年差]
- {price}块，[不值|太贵|冤]
- [不方便|不干净|不安静]，[不便宜|还贵|难受]
- [不如预期|没想到这么差|后悔]
- 老[客户|地方]了，[寒心|不会再来]
- [位置是好|新是新|大是大]，[但不值|可是没法睡|不会来]
"""

# Neutral stages of a stay, for the long stories.
STAGES = """
出发前在网上[看了好几天|比较了很久]，{city}这个地段的{hotel}不多，[价格从一百多到七八百都有|评论有好有坏]，[最后|想来想去]订了这家的{room}。
那天[下着大雨|特别热|火车晚点]，{clock}才到，[拖着{times}个箱子|抱着睡着的孩子|手机也没电了]，一路问过去的。
[办手续的时候|在大堂等的时候]旁边还有[一个旅行团|一家人|几个老外]，大家都在[排队|等房间]，我就[坐在沙发上|站在边上]看了一会儿报纸。
上了{floor}，走廊[有点长|铺着红地毯]，[找了一会儿|拐了两个弯]才看到房间号，插卡，开门。
放下东西先[洗了把脸|烧了壶水|给家里打了个电话]，然后[出去吃饭|去{place}转了转|躺了一会儿]。
晚上[9点|10点多|快12点]回来，[电视看了一会儿|加了会儿班|改了两页PPT]就睡了，第二天还要[早起|见客户|赶路]。
第二天[客户|朋友]来{hotel}找我，在大堂[谈了一个下午|坐了坐]，点了两杯咖啡，[一共{small}块|比外面贵一点]。
同行的[王姐|老李|小张|表弟]住我[隔壁|楼下]，我们[一路上|吃饭时]聊的都是这个。
中间给[客服|订房的网站]打过一次电话，[对方说会反映|说是转给酒店处理]，后来[收到一条短信|又来过一个电话]。
最后一天[睡到自然醒|早早起来收拾]，把东西[清点|整理]了一遍，[退了房|叫了车]去{place}。
回来以后[过了一个星期|一直想着]才来写这个点评，[手机打字|想到哪写到哪]，比较乱，[见谅|将就看]。
说明一下，我常年在外，一年要住[上百|几十]个晚上，[{star}|什么样]的{hotel}都住过，[要求不算高|不算挑剔]，写的都是[亲身经历|实话]。
"""

# The boilerplate of hotels, the same for friend and foe.
REPLIES = """
酒店回复：[感谢|谢谢]您的点评，[您的意见已转给相关部门|我们会继续努力]，期待您再次光临。
补充一句：[发票已收到|写的时候没看清字数，先这样]。
PS：[电话要打总机转|地址在路口往里走一点]，[后来的朋友|打车的]注意。
（[{month}|上周]住的，[现在不知道怎样|仅供参考]）
"""

EMOTICONS = ("^_^", ":)", "呵呵", "哈哈", "-_-||", "=_=", "T_T", "@_@", "Orz", "汗。。。", "囧")

# Slips of the input method: what was meant, and below it what was typed.
MEANT = "的得地在再做已坐账像那哪吧间很舒服总实班宾餐待竟刻带钟价需至决度候喝安"
TYPED = "得的的再在作以座帐象哪那把问狠书付纵是般滨歺呆境克戴种架须致绝渡侯渴按"
SLIPS = list(zip(MEANT, TYPED, strict=True))

# ----------------------------------------------------------------------------------------------------------- grammar

Bank = dict[str, list[str]]  # mark ("+", "-" or "~") -> phrases
Item = TypeVar("Item")

OPPOSITE = {"+": "-", "-": "+"}
BUT = {
    "+-": ("，不过", "，但", "，但是", "。就是", "。只是", "，可", "。"),
    "-+": ("，不过", "，但", "，但是", "。好在", "，还好", "，可", "。"),
}
ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")


def read_bank(text: str) -> Bank:
    """Sort the marked lines of a bank by their mark."""
    bank: Bank = {"+": [], "-": [], "~": []}
    for line in text.strip().splitlines():
        mark, phrase = line.split(" ", 1)
        bank[mark].append(phrase)
    return bank


def read_aspects(text: str) -> dict[str, Bank]:
    """Read the ``# title`` sections of the aspect bank."""
    sections = (section.split("\n", 1) for section in text.strip().removeprefix("# ").split("\n# "))
    return {title: read_bank(lines) for title, lines in sections}


class Writer:
    """Composes reviews with a given verdict ("+" or "-"); every choice comes from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random
        self.aspects = read_aspects(ASPECTS)
        self.unused: list[str] = []  # aspects that the review at hand has not mentioned yet
        self.verdicts, self.frames, self.irony, self.short = map(read_bank, (VERDICTS, FRAMES, IRONY, SHORT))
        self.openings, self.stages, self.replies = (text.strip().splitlines() for text in (OPENINGS, STAGES, REPLIES))
        shares: dict[Callable[[str], str], int] = {
            self.one_liner: 9,
            self.plain: 47,
            self.verdict_decides: 9,
            self.order_decides: 14,
            self.ironic: 7,
            self.pros_and_cons: 4,
            self.story: 10,
        }
        self.kinds = [kind for kind, share in shares.items() for _ in range(share)]

    def review(self, verdict: str) -> str:
        """One review whose overall verdict is ``verdict``."""
        self.unused = list(self.aspects)
        return self.handwriting(self.pick(self.kinds)(verdict))

    # -- the kinds of review

    def one_liner(self, verdict: str) -> str:
        return self.write(self.pick(self.short[verdict])) + self.pick(("", "", "。", "！", "~", "..."))

    def plain(self, verdict: str) -> str:
        """Most remarks agree with the verdict, which may go without saying."""
        count = self.pick((1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 10, 13)) + (verdict == "-" and self.chance(0.5))
        against = int(self.random() * count / 2)
        hedged = int(self.random() * (count - against) / 2)
        marks = [OPPOSITE[verdict]] * against + ["~"] * hedged + [verdict] * (count - against)
        closing = self.verdict(verdict) if self.chance(0.6) else ""
        return self.opening(0.5) + self.remarks(self.shuffled(marks)) + closing

    def verdict_decides(self, verdict: str) -> str:
        """Most remarks speak against the verdict, which has the last word."""
        marks = [OPPOSITE[verdict]] * self.pick((1, 2, 2, 3, 4)) + self.pick((["~"], [], [verdict]))
        turn = self.pick(("不过", "但", "但是", "话说回来，", "说到底，", "即便这样，", ""))
        return self.opening(0.5) + self.remarks(self.shuffled(marks)) + turn + self.verdict(verdict)

    def order_decides(self, verdict: str) -> str:
        """A frame weighs one remark against another: only their order tells which one counts."""
        frame = self.pick(self.frames[verdict])
        aside = self.remarks(["~"] * self.pick((0, 0, 1, 2)))
        body = self.write(frame, praise=self.remark("+"), complaint=self.remark("-")) + "。"
        return self.opening(0.4) + aside + body + (self.verdict(verdict) if self.chance(0.3) else "")

    def ironic(self, verdict: str) -> str:
        remarks = self.remarks([self.pick("+-~") for _ in range(self.pick((0, 0, 1, 2)))])
        lines = [self.write(line) + "。" for line in self.shuffled(self.irony[verdict])[: self.pick((1, 1, 2))]]
        return self.opening(0.3) + remarks + "".join(lines) + (self.verdict(verdict) if self.chance(0.2) else "")

    def pros_and_cons(self, verdict: str) -> str:
        """Two lists of like length; the verdict decides."""
        count = self.pick((1, 2, 2, 3))
        heads = self.shuffled([("+", self.pick(("优点", "好的方面"))), ("-", self.pick(("缺点", "不足")))])
        lists = [
            f"{head}：" + "；".join(f"{number}、{self.remark(mark)}" for number in range(1, count + 1))
            for mark, head in heads
        ]
        separator = self.pick(("\n", "。", "。\n"))
        return separator.join([*lists, self.verdict(verdict)])

    def story(self, verdict: str) -> str:
        """The whole stay in order, a paragraph a stage."""
        stages = self.shuffled(range(len(self.stages)))[: self.pick((2, 3, 4, 5, 7, 9, 12))]
        chances = verdict * 7 + OPPOSITE[verdict] * 2 + "~"
        paragraphs = [
            self.write(self.stages[stage]) + self.remarks([self.pick(chances) for _ in range(self.pick((1, 2, 3, 3)))])
            for stage in sorted(stages)
        ]
        last = self.pick(("", "总结：", "最后说一句，", "啰嗦了这么多，")) + self.verdict(verdict)
        return self.pick(("", "\n", "\n")).join([*paragraphs, last])

    # -- their parts

    def opening(self, probability: float) -> str:
        return self.write(self.pick(self.openings)) if self.chance(probability) else ""

    def verdict(self, mark: str) -> str:
        return self.write(self.pick(self.verdicts[mark])) + self.pick(("。", "。", "！", "！", "...", ""))

    def remark(self, mark: str) -> str:
        """A remark on an aspect that this review has not mentioned yet."""
        title = self.unused.pop(int(self.random() * len(self.unused)))
        return self.write(self.pick(self.aspects[title][mark]))

    def remarks(self, marks: Sequence[str]) -> str:
        """Remarks of the given marks as running text; a change of tone mostly gets its "but"."""
        text = ""
        for before, mark in zip(["", *marks], marks, strict=False):
            if before + mark in BUT:
                text += self.pick(BUT[before + mark])
            elif before:
                text += self.pick(("，", "，", "。", "。", "；", "，而且", "。另外", "。还有，"))
            text += self.remark(mark)
        return text and text + self.pick(("。", "。", "。", "！", "……"))

    def write(self, pattern: str, **remarks: str) -> str:
        """Expand the slots and alternatives of a pattern."""
        pattern = SLOT.sub(lambda slot: remarks.get(slot[1]) or f"[{SLOTS[slot[1]]}]", pattern)
        while ALTERNATIVES.search(pattern):
            pattern = ALTERNATIVES.sub(lambda found: self.pick(found[1].split("|")), pattern)
        return pattern

    def handwriting(self, text: str) -> str:
        """One writer's punctuation, quotation marks, slips and emoticons, which don't depend on the verdict."""
        if self.chance(0.05):
            text += self.pick((" ", "\n")) + self.write(self.pick(self.replies))
        for meant, typed in self.shuffled(SLIPS)[: self.pick((0, 0, 1, 3, 5))]:
            text = text.replace(meant, typed, 1)
        if self.chance(0.6):
            text = re.sub("[“”]", '"', text)
        habit = self.random()
        if habit < 0.25:
            text = text.translate(str.maketrans("，。！：；？（）", ",.!:;?()"))
        elif habit < 0.33:
            text = text.replace("！", "！！！").replace("。", "。。。")
        elif habit < 0.38:
            text = re.sub("[，。；]", " ", text)
        elif habit < 0.55:
            text = text.rstrip("。！.").replace("。", "，")
        return text.strip() + (self.pick(EMOTICONS) if self.chance(0.06) else "")

    # -- chance

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pick(self, options: Sequence[Item]) -> Item:
        return options[int(self.random() * len(options))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        return [item for _, item in sorted(((self.random(), item) for item in items), key=lambda pair: pair[0])]


# -------------------------------------------------------------------------------------------------------------- file


def sample_rows() -> list[tuple[int, str]]:
    """The ``(label, review)`` rows, positive ones first; no two reviews are the same, white space aside."""
    writer = Writer(SEED)
    rows: list[tuple[int, str]] = []
    seen: set[str] = set()
    for label, verdict, count in ((POSITIVE, "+", POSITIVE_ROWS), (NEGATIVE, "-", NEGATIVE_ROWS)):
        written = 0
        while written < count:
            review = writer.review(verdict)
            if (bare := "".join(review.split())) not in seen:
                seen.add(bare)
                rows.append((label, review))
                written += 1
    return rows


def as_csv(rows: Sequence[tuple[int, str]]) -> bytes:
    """The rows as CSV with the header ``label,review``: UTF-8, no byte-order mark, LF line ends."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("label", "review"))
    writer.writerows(rows)
    return text.getvalue().encode("utf-8")


def describe(rows: Sequence[tuple[int, str]]) -> str:
    """Rows, share of the positive class, and the characters per review: the figures in ``data/README.md``."""
    lengths = [len(review) for _, review in rows]
    broken, quoting = (sum(mark in review for _, review in rows) for mark in '\n"')
    twentieths = statistics.quantiles(lengths, n=20, method="inclusive")
    return (
        f"{len(rows)} rows, {sum(label for label, _ in rows) / len(rows):.1%} positive; characters per review: "
        f"min {min(lengths)}, 5 % {twentieths[0]:.0f}, median {statistics.median(lengths):.0f}, "
        f"mean {statistics.mean(lengths):.0f}, 95 % {twentieths[18]:.0f}, max {max(lengths)}; "
        f"{broken} with a line break, {quoting} with a double quote"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the synthetic sample reviews.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("sample_reviews.csv"))
    output: Path = parser.parse_args().output
    rows = sample_rows()
    output.write_bytes(as_csv(rows))
    print(f"{output}: {describe(rows)}")


if __name__ == "__main__":
    main()
